// What kernels call in checking mode, in which programs run one after the other; `checking.py` says what is reported.
#pragma once
#include "runtime.h"

// An access of the kernel; accesses are numbered from 1.
struct Access {
  int32_t first, count;  // where in `bases` the arguments are that its address may come from; none: it is not known
  int32_t order;         // of an atomic operation, as in Triton: 1 relaxed, 2 acquire, 3 release, 4 both
  int32_t is_volatile;
  uint64_t poison;  // 0: any bits may be read
};

enum Reason : int32_t { kNone, kOutside, kRace, kPoison };

// The first failure; read by `checking.py`.
struct Failure {
  int32_t reason, access, other, size;  // `other`: the access of the other program
  int64_t program, other_program, address;
  uint64_t before, after;  // bits in memory, bits to be stored
};

// What ends a launch.
struct Stop {};

template <class T>
struct Same {
  using type = T;
};

// A growing array.
template <class T>
struct List {
  T* items = nullptr;
  size_t size = 0, room = 0;
  void add(const T& item) {
    if (size == room) items = (T*)realloc(items, (room = room ? 2 * room : 64) * sizeof(T));
    items[size++] = item;
  }
  ~List() { free(items); }
};

// That a program made an access, when so many synchronisations had happened.
struct Touch {
  int32_t program, access;
  uint32_t time;
};

// What is known of one unit of memory, the smallest that the kernel accesses. Touches are numbered from 1.
struct Cell {
  uint32_t write : 30;       // the last write
  uint32_t is_atomic : 1;    // whether it was atomic
  uint32_t has_changed : 1;  // whether any write changed the bits in memory
  uint32_t read[2];          // the last read, and the last read by another program than that
  uint32_t event;            // the last synchronisation through it
};

// An atomic operation that orders what programs do: it comes after two earlier ones (0: none).
struct Event {
  int32_t program;
  uint32_t before[2];
};

class Check {
 public:
  template <size_t N>
  Check(const Access (&accesses)[N], const int32_t* bases, const int64_t* bounds, const int32_t* grid, int grain,
        Failure* failure)
      : accesses_(accesses), bases_(bases), bounds_(bounds), grid_(grid), grain_(grain), failure_(failure) {
    events_.add({-1, {0, 0}});
    marks_.add(0);
    touches_.add({-1, 0, 0});
    mask_ = grain == 3 ? ~0ull : (1ull << (8 << grain)) - 1;
    for (size_t i = 0; i <= N; i++) newest_.add(0);
  }
  ~Check() {
    for (size_t i = 0; i < room_; i++) free(pages_[i]);
    free(pages_);
  }
  Check(const Check&) = delete;

  void enter(int32_t x, int32_t y, int32_t z) {
    program_ = (int32_t)(x + (int64_t)grid_[0] * (y + (int64_t)grid_[1] * z));
    latest_ = 0;
  }

  template <class T>
  bool load(const T* p, int32_t access) {
    note_load((int64_t)p, sizeof(T), access);
    return true;
  }
  template <class T>
  bool store(T* p, typename Same<T>::type value, int32_t access) {
    note_store((int64_t)p, sizeof(T), bits_as<typename Word<sizeof(T)>::type>(value), access);
    return true;
  }
  template <class T>
  bool atomic(T* p, int32_t access) {
    note_atomic((int64_t)p, sizeof(T), access);
    return true;
  }

 private:
  static constexpr int kCells = 64;
  struct Page {
    uint64_t number;
    Cell cells[kCells];
  };

  __attribute__((noinline)) void note_load(int64_t address, int size, int32_t access) {
    within(address, size, access);
    const Access& a = accesses_[access - 1];
    const uint32_t touch = now(access);
    for (int at = 0; at < size && !a.is_volatile; at += 1 << grain_) {
      Cell& cell = cell_at(address + at);
      if (cell.has_changed && conflicts(cell.write)) race(cell.write, address, size, access, 0);
      if (cell.read[0] == touch) continue;
      if (cell.read[0] && touches_.items[cell.read[0]].program != program_) cell.read[1] = cell.read[0];
      cell.read[0] = touch;
    }
    unpoisoned(address, size, access);
  }

  __attribute__((noinline)) void note_store(int64_t address, int size, uint64_t bits, int32_t access) {
    within(address, size, access);
    const uint64_t changed = bits_at(address, size) ^ bits;
    const uint32_t touch = now(access);
    for (int at = 0; at < size; at += 1 << grain_) {
      Cell& cell = cell_at(address + at);
      const bool differs = changed >> 8 * at & mask_;
      if ((differs || cell.is_atomic) && conflicts(cell.write)) race(cell.write, address, size, access, bits);
      for (const uint32_t read : cell.read)
        if (differs && conflicts(read)) race(read, address, size, access, bits);
      cell.write = touch;
      cell.is_atomic = 0;
      cell.has_changed |= differs;
    }
  }

  __attribute__((noinline)) void note_atomic(int64_t address, int size, int32_t access) {
    within(address, size, access);
    unpoisoned(address, size, access);
    synchronise(cell_at(address), accesses_[access - 1].order);
    const uint32_t touch = now(access);
    for (int at = 0; at < size; at += 1 << grain_) {
      Cell& cell = cell_at(address + at);
      if (!cell.is_atomic && conflicts(cell.write)) race(cell.write, address, size, access, 0);
      for (const uint32_t read : cell.read)
        if (conflicts(read)) race(read, address, size, access, 0);
      cell.write = touch;
      cell.is_atomic = cell.has_changed = 1;
    }
  }

  // Bounds

  void within(int64_t address, int size, int32_t access) {
    const Access& a = accesses_[access - 1];
    // Nothing lives in the first page of memory.
    bool good = a.count == 0 && (uint64_t)address >= 4096;
    for (int i = 0; i < a.count; i++) {
      const int64_t* bounds = bounds_ + 2 * bases_[a.first + i];
      good |= address >= bounds[0] && address + size <= bounds[1];
    }
    if (!good) fail(kOutside, 0, address, size, access, 0, 0);
  }

  void unpoisoned(int64_t address, int size, int32_t access) {
    const uint64_t poison = accesses_[access - 1].poison;
    if (poison && bits_at(address, size) == poison) fail(kPoison, 0, address, size, access, poison, 0);
  }

  // Races

  uint32_t now(int32_t access) {
    uint32_t& newest = newest_.items[access];
    const Touch& touch = touches_.items[newest];
    const uint32_t time = (uint32_t)(events_.size - 1);
    if (touch.program == program_ && touch.time == time) return newest;
    touches_.add({program_, access, time});
    return newest = (uint32_t)(touches_.size - 1);
  }

  bool conflicts(uint32_t number) {
    const Touch& touch = touches_.items[number];
    return number && touch.program != program_ && !(latest_ && is_before(touch));
  }

  // Whether a chain of atomic operations leads from another program, after what it did, to what happens now.
  bool is_before(const Touch& touch) {
    if (asked_.program == touch.program && asked_.time == touch.time && asked_from_ == latest_) return answer_;
    asked_ = touch;
    asked_from_ = latest_;
    answer_ = false;
    waiting_.size = 0;
    search_++;
    waiting_.add(latest_);
    while (waiting_.size && !answer_) {
      const uint32_t event = waiting_.items[--waiting_.size];
      // What comes before an event has a smaller number.
      if (event <= touch.time || marks_.items[event] == search_) continue;
      marks_.items[event] = search_;
      answer_ = events_.items[event].program == touch.program;
      for (uint32_t before : events_.items[event].before) waiting_.add(before);
    }
    return answer_;
  }

  void synchronise(Cell& cell, int32_t order) {
    const bool acquires = order == 2 || order == 4, releases = order == 3 || order == 4;
    if (!acquires && !releases) return;
    latest_ = event(latest_, acquires ? cell.event : 0);
    if (releases) cell.event = acquires ? latest_ : event(latest_, cell.event);
  }

  uint32_t event(uint32_t first, uint32_t second) {
    events_.add({program_, {first, second}});
    marks_.add(0);
    return (uint32_t)(events_.size - 1);
  }

  // The table of cells: pages, found by open addressing

  Cell& cell_at(int64_t address) {
    const uint64_t number = (uint64_t)address >> grain_, page = number / kCells;
    Page*& recent = recent_[page % kRecent];
    if (!recent || recent->number != page) recent = page_of(page);
    return recent->cells[number % kCells];
  }

  Page* page_of(uint64_t number) {
    if (2 * used_ >= room_) grow();
    Page*& slot = slot_of(number);
    if (!slot) {
      slot = (Page*)calloc(1, sizeof(Page));
      slot->number = number;
      used_++;
    }
    return slot;
  }

  Page*& slot_of(uint64_t number) {
    size_t at = (size_t)((number * 0x9E3779B97F4A7C15ull) >> 20) & (room_ - 1);
    while (pages_[at] && pages_[at]->number != number) at = (at + 1) & (room_ - 1);
    return pages_[at];
  }

  void grow() {
    Page** old = pages_;
    const size_t size = room_;
    room_ = room_ ? 2 * room_ : 256;
    pages_ = (Page**)calloc(room_, sizeof(Page*));
    for (size_t i = 0; i < size; i++)
      if (old[i]) slot_of(old[i]->number) = old[i];
    free(old);
  }

  // Failures

  static uint64_t bits_at(int64_t address, int size) {
    switch (size) {
      case 1:
        return *(const uint8_t*)address;
      case 2:
        return *(const uint16_t*)address;
      case 4:
        return *(const uint32_t*)address;
      default:
        return *(const uint64_t*)address;
    }
  }

  void race(uint32_t other, int64_t address, int size, int32_t access, uint64_t after) {
    fail(kRace, other, address, size, access, bits_at(address, size), after);
  }

  [[noreturn]] __attribute__((noinline, cold)) void fail(Reason reason, uint32_t other, int64_t address, int size,
                                                         int32_t access, uint64_t before, uint64_t after) {
    const Touch& touch = touches_.items[other];
    *failure_ = {reason, access, touch.access, size, program_, touch.program, address, before, after};
    throw Stop{};
  }

  static constexpr int kRecent = 64;
  const Access* accesses_;
  const int32_t* bases_;
  const int64_t* bounds_;
  const int32_t* grid_;
  int grain_;      // 2 to this power are the bytes of a cell
  uint64_t mask_;  // as many bits
  Failure* failure_;
  int32_t program_ = 0;
  uint32_t latest_ = 0, search_ = 0, asked_from_ = 0;
  Touch asked_ = {-1, 0, 0};
  List<Touch> touches_;
  List<uint32_t> newest_;  // of each access
  bool answer_ = false;
  List<Event> events_;
  List<uint32_t> marks_, waiting_;
  Page** pages_ = nullptr;
  size_t room_ = 0, used_ = 0;
  Page* recent_[kRecent] = {};
};
