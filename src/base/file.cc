#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace nibble {
namespace {

Error os_error(std::string_view what, const std::string& path) {
  const int code = errno;
  return Error(code == ENOENT ? Code::kNotFound : Code::kIo,
               cat(what, " '", path, "': ", std::strerror(code)));
}

Result<void> sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return os_error("cannot open directory", path);
  const int rc = ::fsync(fd);
  ::close(fd);
  if (rc != 0) return os_error("cannot sync directory", path);
  return {};
}

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

int64_t status_kib(const char* key) {
  std::ifstream status("/proc/self/status");
  std::string line;
  const size_t length = std::strlen(key);
  while (std::getline(status, line)) {
    if (line.compare(0, length, key) == 0) return std::atoll(line.c_str() + length);
  }
  return 0;
}

}  // namespace

Result<File> File::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return os_error("cannot open", path);
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    const Error error = os_error("cannot stat", path);
    ::close(fd);
    return error;
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    return Error(Code::kInvalidArgument, cat("'", path, "' is not a regular file"));
  }
  return File(fd, info.st_size, path);
}

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), size_(other.size_), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
    size_ = other.size_;
    path_ = std::move(other.path_);
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

Result<void> File::read_at(int64_t offset, std::span<std::byte> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = ::pread(fd_, out.data() + done, out.size() - done,
                              static_cast<off_t>(offset) + static_cast<off_t>(done));
    if (n < 0) {
      if (errno == EINTR) continue;
      return os_error("cannot read", path_);
    }
    if (n == 0) {
      return Error(Code::kCorruptInput,
                   cat("'", path_, "' ends at byte ", offset + static_cast<int64_t>(done),
                       ", needed ", offset + static_cast<int64_t>(out.size())));
    }
    done += static_cast<size_t>(n);
  }
  return {};
}

void File::drop_cache(int64_t offset, int64_t bytes) const {
  ::posix_fadvise(fd_, offset, bytes, POSIX_FADV_DONTNEED);
}

Result<std::string> read_text_file(const std::string& path, int64_t limit_bytes) {
  NIBBLE_TRY(File file, File::open(path));
  if (file.size() > limit_bytes) {
    return Error(Code::kInvalidArgument,
                 cat("'", path, "' has ", file.size(), " bytes, the limit is ", limit_bytes));
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  NIBBLE_TRY(file.read_at(0, std::as_writable_bytes(std::span(text))));
  return text;
}

Result<void> write_file_atomic(const std::string& path, std::string_view bytes) {
  const std::string aside = cat(path, ".partial-", ::getpid());
  {
    NIBBLE_TRY(FileWriter writer, FileWriter::create(aside));
    NIBBLE_TRY(writer.append(std::as_bytes(std::span(bytes.data(), bytes.size()))));
    NIBBLE_TRY(writer.finish());
  }
  if (::rename(aside.c_str(), path.c_str()) != 0) {
    const Error error = os_error("cannot rename to", path);
    ::unlink(aside.c_str());
    return error;
  }
  return sync_directory(parent_of(path));
}

bool file_exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

bool directory_exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

Result<FileWriter> FileWriter::create(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return os_error("cannot create", path);
  return FileWriter(fd, path);
}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

FileWriter::~FileWriter() {
  if (fd_ >= 0) ::close(fd_);
}

Result<void> FileWriter::append(std::span<const std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::write(fd_, bytes.data() + done, bytes.size() - done);
    if (n < 0) {
      if (errno == EINTR) continue;
      return os_error("cannot write", path_);
    }
    done += static_cast<size_t>(n);
  }
  return {};
}

Result<void> FileWriter::finish() {
  if (::fsync(fd_) != 0) return os_error("cannot sync", path_);
  const int rc = ::close(std::exchange(fd_, -1));
  if (rc != 0) return os_error("cannot close", path_);
  return {};
}

Result<StagedDirectory> StagedDirectory::create(const std::string& target) {
  std::string clean = target;
  while (clean.size() > 1 && clean.back() == '/') clean.pop_back();
  std::error_code code;
  if (std::filesystem::exists(clean, code)) {
    return Error(Code::kInvalidArgument,
                 cat("'", clean, "' already exists; choose a new directory"));
  }
  const std::string staging = cat(clean, ".partial-", ::getpid());
  std::filesystem::remove_all(staging, code);
  std::filesystem::create_directories(staging, code);
  if (code) return Error(Code::kIo, cat("cannot create '", staging, "': ", code.message()));
  return StagedDirectory(staging, clean);
}

StagedDirectory::StagedDirectory(StagedDirectory&& other) noexcept
    : staging_(std::exchange(other.staging_, {})), target_(std::move(other.target_)) {}

StagedDirectory::~StagedDirectory() {
  if (staging_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(staging_, ignored);
}

Result<void> StagedDirectory::commit() {
  NIBBLE_TRY(sync_directory(staging_));
  if (::rename(staging_.c_str(), target_.c_str()) != 0) {
    return os_error("cannot rename to", target_);
  }
  staging_.clear();
  return sync_directory(parent_of(target_));
}

int64_t peak_rss_bytes() { return status_kib("VmHWM:") * 1024; }
int64_t current_rss_bytes() { return status_kib("VmRSS:") * 1024; }

}  // namespace nibble
