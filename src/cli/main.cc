#include <iostream>

#include "cli/command.h"

int main(int argc, char** argv) { return nibble::cli::run_main(argc, argv, std::cout, std::cerr); }
