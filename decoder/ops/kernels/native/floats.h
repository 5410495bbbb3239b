// Few rows times a float matrix: out[r, f] = Σ_d x[r, d] · w[f, d], accumulated in float32.
//
// Every weight is read from memory once, whatever the number of rows: a few rows of weights meet all rows of x before
// the next are touched. One row is bound by memory bandwidth; eight cost little more.
#ifndef DECODER_FLOATS_H_
#define DECODER_FLOATS_H_

#include <algorithm>
#include <vector>

#include "simd.h"

namespace decoder {

constexpr int64_t kNear = 16 << 10;  // bytes of x that stay in the first-level cache while weights pass through it

// Adds the dot products of R rows of x and M rows of w over inputs from … to − 1, whole vectors, as vectors still to be
// summed: partial[r * W + m]. Meanwhile fetches what lies from `ahead` on, `pace` bytes for each vector of x, into L2,
// which keeps more reads in flight than L1.
template <int R, int M, typename T>
void tile(const float* x, const T* w, int64_t D, int64_t from, int64_t to, const char* ahead, int64_t pace,
          F32* partial) {
  constexpr int kLines = std::max<int>(1, M * W * sizeof(T) / 64);
  F32 acc[R][M];
  each<R>([&](auto r) DECODER_INLINE { each<M>([&](auto m) DECODER_INLINE { acc[r][m] = partial[r * W + m]; }); });
#pragma GCC unroll 1
  for (int64_t d = from; d < to; d += W, ahead += pace) {
    each<kLines>([&](auto i) DECODER_INLINE { __builtin_prefetch(ahead + i * pace / kLines, 0, 2); });
    F32 wide[M];
    each<M>([&](auto m) DECODER_INLINE { wide[m] = keep(load(w + m * D + d)); });
    each<R>([&](auto r) DECODER_INLINE {
      const F32 one = keep(load(x + r * D + d));
      each<M>([&](auto m) DECODER_INLINE { acc[r][m] += one * wide[m]; });
    });
  }
  each<R>([&](auto r) DECODER_INLINE { each<M>([&](auto m) DECODER_INLINE { partial[r * W + m] = acc[r][m]; }); });
}

// Rows of x, `size` at a time, against M rows of w, as `tile`. The rows of w that come later are fetched evenly over all
// that time, in the order in which they lie in memory.
template <int M, typename T>
void strip(const float* x, int64_t rows, int64_t size, const T* w, int64_t D, int64_t from, int64_t to, F32* partial) {
  using Tile = void (*)(const float*, const T*, int64_t, int64_t, int64_t, const char*, int64_t, F32*);
  static constexpr Tile tiles[] = {tile<1, M, T>, tile<2, M, T>, tile<3, M, T>, tile<4, M, T>,
                                   tile<5, M, T>, tile<6, M, T>, tile<7, M, T>, tile<8, M, T>};
  const int64_t groups = (rows + size - 1) / size, pace = M * W * int64_t{sizeof(T)} / groups;
  const char* ahead = reinterpret_cast<const char*>(w + (rows == 1 ? 2 * M : W) * D + M * from);
  for (int64_t r = 0; r < rows; r += size, ahead += (to - from) / W * pace) {
    tiles[std::min(rows - r, size) - 1](x + r * D, w, D, from, to, ahead, pace, partial + r * W);
  }
}

// Any number of rows of x against `count` rows of w; results of a row of x lie `stride` after those of the one before.
template <typename T>
void float_rows(const float* x, int64_t rows, const T* w, int64_t count, int64_t D, float* out, int64_t stride) {
  constexpr int64_t kMost = W == 16 ? 8 : 6;  // a tile's accumulators must fit the registers
  static thread_local std::vector<F32> partial;
  partial.resize(rows * W);
  const int64_t groups = (rows + kMost - 1) / kMost, size = (rows + groups - 1) / groups, whole = D / W * W;
  const int64_t stretches = (rows * D * int64_t{sizeof(float)} + kNear - 1) / kNear;
  const int64_t stretch = (whole / stretches + W - 1) / W * W;
  const int64_t together = size <= (W == 16 ? 4 : 2) ? 4 : 2;  // rows of w that meet x at once
  for (int64_t f = 0; f < count; f += W) {
    const int64_t some = std::min<int64_t>(W, count - f);
    std::fill(partial.begin(), partial.end(), F32{});
    for (int64_t d = 0; d < whole; d += stretch) {
      const int64_t end = std::min(whole, d + stretch);
      int64_t m = 0;
      for (; m + together <= some; m += together) {
        (together == 4 ? strip<4, T> : strip<2, T>)(x, rows, size, w + (f + m) * D, D, d, end, partial.data() + m);
      }
      for (; m < some; ++m) strip<1, T>(x, rows, size, w + (f + m) * D, D, d, end, partial.data() + m);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t m = 0; m < some; ++m) {
        for (int64_t d = whole; d < D; ++d) partial[r * W + m][0] += x[r * D + d] * widen(w[(f + m) * D + d]);
      }
      const F32 total = sums(partial.data() + r * W);
      if (some == W) store(out + r * stride + f, total);
      else std::memcpy(out + r * stride + f, &total, some * sizeof(float));
    }
  }
}

}  // namespace decoder

#endif  // DECODER_FLOATS_H_
