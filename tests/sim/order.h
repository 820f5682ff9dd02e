// What happens before what. The host and every stream have a vector clock; every block of memory remembers who
// touched which of its bytes when. Two accesses of two streams, one of which writes, must be ordered by an event,
// by a wait, or by the host. Nothing here knows of torch; the caller holds `Order::lock`.
#pragma once
#include <sys/mman.h>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace sim {

using Stream = int64_t;  // 0 is the default one
using Clock = std::unordered_map<Stream, uint64_t>;

inline uint64_t seen(const Clock& clock, Stream stream) {
  auto i = clock.find(stream);
  return i == clock.end() ? 0 : i->second;
}
inline void join(Clock& into, const Clock& other) {
  for (auto& [stream, at] : other) {
    auto& mine = into[stream];
    if (at > mine) mine = at;
  }
}

struct Finding {
  const char* kind;
  std::string what;
};

struct Access {
  Stream stream;
  uint64_t at;
  size_t from, to;  // bytes of the block
  bool write;
};

struct Block {
  size_t size, room;  // room: whole pages
  bool pinned;        // the host's memory, which streams may copy from and to
  size_t taken = 0;   // of it, if so
  Stream stream;      // that it was allocated on
  int open = 0;       // how many look into it on behalf of the device
  std::vector<Access> accesses;
  std::set<Stream> recorded;  // by record_stream
};

inline std::string name(Stream stream) { return stream ? "stream " + std::to_string(stream) : "the default stream"; }

class Order {
 public:
  std::recursive_mutex lock;

  // taken: the bytes that the host's allocator takes for it, if it is pinned.
  char* allocate(size_t size, bool pinned, Stream stream, size_t taken = 0) {
    size_t room = (size + kPage - 1) / kPage * kPage;
    void* p = mmap(nullptr, room, pinned ? kOpen : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    Block block;
    block.size = size, block.room = room, block.pinned = pinned, block.stream = stream, block.taken = taken;
    blocks_.emplace((char*)p, std::move(block));
    if (pinned) {
      pin(size, taken);
    } else {
      allocated_ += rounded(size);
      if (allocated_ > most_) most_ = allocated_;
    }
    return (char*)p;
  }

  // Pinned memory that a stream still uses may be given back: CUDA's allocator keeps it till then.
  std::vector<Finding> free(char* p) {
    std::vector<Finding> findings;
    auto i = blocks_.find(p);
    if (i == blocks_.end()) return findings;
    Block& block = i->second;
    if (!block.pinned) {
      Clock owner = clocks_[block.stream];
      join(owner, host_);
      for (auto& a : block.accesses)
        if (a.stream != block.stream && a.at > seen(owner, a.stream) && !block.recorded.count(a.stream)) {
          findings.push_back({"freed", "memory of " + name(block.stream) + " is given back while " + name(a.stream) +
                                           (a.write ? " may write" : " may read")});
          break;
        }
      allocated_ -= rounded(block.size);
    } else {
      pinned_ -= block.size, taken_ -= block.taken;
    }
    munmap(p, block.room);
    blocks_.erase(i);
    return findings;
  }

  std::vector<Finding> access(const void* p, size_t bytes, bool write, Stream stream, const std::string& by) {
    std::vector<Finding> findings;
    auto i = find(p);
    if (i == blocks_.end() || !bytes) return findings;
    Block& block = i->second;
    Clock& clock = clocks_[stream];
    join(clock, host_);
    uint64_t now = ++clock[stream];
    size_t from = (const char*)p - i->first, to = from + bytes;
    std::vector<Access> kept;
    for (auto& a : block.accesses) {
      if (a.at <= seen(host_, a.stream)) continue;  // all that comes is after it
      bool meet = a.from < to && from < a.to;
      if (meet && (a.write || write) && a.stream != stream && a.at > seen(clock, a.stream))
        findings.push_back({"race", by + (write ? " writes on " : " reads on ") + name(stream) + " what " +
                                        name(a.stream) + (a.write ? " writes" : " reads")});
      bool covered = a.stream == stream && a.from >= from && a.to <= to && (write || !a.write);
      if (!covered) kept.push_back(a);
    }
    kept.push_back({stream, now, from, to, write});
    if (kept.size() > kMost) kept.erase(kept.begin());
    block.accesses.swap(kept);
    if (block.pinned) {
      pending_.insert(i->first);
      close(i->first, block);
    }
    return findings;
  }

  // While it is open, the device's emulation may touch a block.
  char* open(const void* p) {
    auto i = find(p);
    if (i == blocks_.end()) return nullptr;
    if (i->second.open++ == 0) mprotect(i->first, i->second.room, kOpen);
    return i->first;
  }
  void close(char* base) {
    auto i = blocks_.find(base);
    if (i != blocks_.end() && --i->second.open == 0) close(base, i->second);
  }

  // The host touched an address that is closed to it: once told, it may.
  std::vector<Finding> touched(const void* p) {
    auto i = find(p);
    if (i == blocks_.end()) return {};
    mprotect(i->first, i->second.room, kOpen);
    return {{"host", i->second.pinned ? "the host touches pinned memory that a stream may still use"
                                      : "the host touches the device's memory"}};
  }

  void record_stream(const void* p, Stream stream) {
    auto i = find(p);
    if (i != blocks_.end()) i->second.recorded.insert(stream);
  }
  bool is_pinned(const void* p) {
    auto i = find(p);
    return i != blocks_.end() && i->second.pinned;
  }

  Clock now(Stream stream) {
    join(clocks_[stream], host_);
    return clocks_[stream];
  }
  void stream_waits(Stream stream, const Clock& event) { join(clocks_[stream], event); }
  void host_waits(const Clock& event) {
    join(host_, event);
    for (auto i = pending_.begin(); i != pending_.end();) {
      auto block = blocks_.find(*i);
      bool goes_on = block != blocks_.end();
      if (goes_on) {
        goes_on = false;
        for (auto& a : block->second.accesses) goes_on |= a.at > seen(host_, a.stream);
        close(*i, block->second);
      }
      i = goes_on ? std::next(i) : pending_.erase(i);
    }
  }
  void host_waits_for_all() {
    for (auto& [stream, clock] : std::map<Stream, Clock>(clocks_.begin(), clocks_.end())) host_waits(clock);
  }

  Stream new_stream() { return ++streams_; }
  int64_t allocated() const { return allocated_; }
  int64_t most() const { return most_; }
  void restart_peak() { most_ = allocated_; }
  // of pinned memory at its most: the bytes that were asked for, and what was taken for them
  int64_t most_pinned() const { return most_pinned_; }
  int64_t most_taken() const { return most_taken_; }
  void restart_pinned() { most_pinned_ = pinned_, most_taken_ = taken_; }

 private:
  static constexpr int kOpen = PROT_READ | PROT_WRITE;
  static constexpr size_t kPage = 4096, kMost = 512;

  std::map<char*, Block> blocks_;
  std::set<char*> pending_;  // pinned blocks that streams may use
  std::unordered_map<Stream, Clock> clocks_;
  Clock host_;
  Stream streams_ = 0;
  int64_t allocated_ = 0, most_ = 0;
  int64_t pinned_ = 0, taken_ = 0, most_pinned_ = 0, most_taken_ = 0;

  void pin(size_t size, size_t taken) {
    pinned_ += size, taken_ += taken;
    if (taken_ > most_taken_) most_pinned_ = pinned_, most_taken_ = taken_;
  }

  static int64_t rounded(size_t size) { return (size + 511) / 512 * 512; }

  std::map<char*, Block>::iterator find(const void* p) {
    auto i = blocks_.upper_bound((char*)p);
    if (i == blocks_.begin()) return blocks_.end();
    --i;
    return (char*)p < i->first + i->second.room ? i : blocks_.end();
  }

  // Shut a block as its kind asks for: the device's always, pinned memory where a stream may still be at it.
  void close(char* base, Block& block) {
    if (block.open) return;
    if (!block.pinned) {
      mprotect(base, block.room, PROT_NONE);
      return;
    }
    mprotect(base, block.room, kOpen);
    for (bool write : {false, true})
      for (auto& a : block.accesses) {
        if (a.write != write || a.at <= seen(host_, a.stream)) continue;
        size_t from = a.from / kPage * kPage, to = (a.to + kPage - 1) / kPage * kPage;
        mprotect(base + from, to - from, write ? PROT_NONE : PROT_READ);
      }
  }
};

}  // namespace sim
