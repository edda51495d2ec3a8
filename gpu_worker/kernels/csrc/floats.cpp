// Products of any number of rows with a float32 matrix. Needs AVX-512, or AVX2 with FMA.
#include "vec.h"

namespace {

struct Numbers {
  static constexpr bool SCALED = false;
  typedef float Number;
  typedef float Word;
  typedef Vec Words;
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
  static constexpr bool USABLE = true;
#else
  static constexpr bool USABLE = false;
#endif
  static Vec add(Vec sum, Vec words, float word) { return sum + words * word; }
};

}  // namespace

#include "panel_exports.h"
