// Files: bounded reads, and writes that are whole or absent (write aside, fsync, rename).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

/// A read-only regular file. Moves, closes itself. Thread-safe: read_at keeps no position.
class File {
 public:
  /// Errors: kNotFound, kIo (naming path and reason); kInvalidArgument if it is no regular file.
  static Result<File> open(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  /// Fills `out` from `offset`. Errors: kCorruptInput if the file ends first, kIo otherwise.
  Result<void> read_at(int64_t offset, std::span<std::byte> out) const;
  /// Tells the kernel that pages of this range are no longer wanted in the page cache mapping.
  void drop_cache(int64_t offset, int64_t bytes) const;

 private:
  File(int fd, int64_t size, std::string path) : fd_(fd), size_(size), path_(std::move(path)) {}
  int fd_ = -1;
  int64_t size_ = 0;
  std::string path_;
};

/// The whole file as text, refusing files above `limit_bytes`.
Result<std::string> read_text_file(const std::string& path, int64_t limit_bytes = 1LL << 30);

/// Writes `path` whole: to a neighbour file, fsync, rename, fsync of the folder.
Result<void> write_file_atomic(const std::string& path, std::string_view bytes);

bool file_exists(const std::string& path);
bool directory_exists(const std::string& path);

/// Appends to a new file; used inside a StagedDirectory, which makes the result atomic.
class FileWriter {
 public:
  static Result<FileWriter> create(const std::string& path);
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;
  ~FileWriter();
  Result<void> append(std::span<const std::byte> bytes);
  /// fsync and close. A writer that is destroyed without it leaves an incomplete file behind.
  Result<void> finish();

 private:
  FileWriter(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::string path_;
};

/// A directory that appears under its name only when commit() succeeds; until then it is
/// `<target>.partial-<pid>`, removed on destruction. Errors: kInvalidArgument if `target` exists.
class StagedDirectory {
 public:
  static Result<StagedDirectory> create(const std::string& target);
  StagedDirectory(StagedDirectory&& other) noexcept;
  StagedDirectory& operator=(StagedDirectory&&) = delete;
  ~StagedDirectory();
  const std::string& path() const { return staging_; }
  Result<void> commit();

 private:
  StagedDirectory(std::string staging, std::string target)
      : staging_(std::move(staging)), target_(std::move(target)) {}
  std::string staging_, target_;
};

/// Peak and current resident set of this process, from /proc/self/status. 0 where unknown.
int64_t peak_rss_bytes();
int64_t current_rss_bytes();

}  // namespace nibble
