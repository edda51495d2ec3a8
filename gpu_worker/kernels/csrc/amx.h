// The matrix unit (AMX) of newer Intel processors. HAS_AMX where the compiler may use it, may_use_amx() where Linux lets it.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

// Linux gives a process the unit's registers if it asks.
inline bool may_use_amx() {
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return granted;
}

// To be called between a store and the load of a tile that reads it, in one function: GCC takes that load for an
// instruction that reads no memory, and may move the store behind it.
inline void finish_stores() { asm volatile("" : : : "memory"); }

// Eight registers of up to 64 bytes a row; given back at the end, so that a switch of threads need not save them.
class AmxRegisters {
 public:
  // `rows` of registers 0 to 7, and bytes of each row.
  explicit AmxRegisters(const uint8_t (&rows)[8], const uint8_t (&bytes)[8] = {64, 64, 64, 64, 64, 64, 64, 64}) {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = rows[i];
      config.row_bytes[i] = bytes[i];
    }
    asm volatile("" : : "r"(&config) : "memory");  // GCC takes the instruction for one that reads 8 bytes
    _tile_loadconfig(&config);
  }
  // Eight KiB of state: a thread that keeps them makes each switch of threads save and load them.
  ~AmxRegisters() { _tile_release(); }
  AmxRegisters(const AmxRegisters&) = delete;
  AmxRegisters& operator=(const AmxRegisters&) = delete;
};

}  // namespace
#endif
