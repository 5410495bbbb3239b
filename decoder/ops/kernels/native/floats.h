// Few rows times a float matrix: out[r, f] = Σ_d x[r, d] · w[f, d], accumulated in float32.
//
// Every weight is read from memory once, whatever the number of rows: a tile of weight rows meets all rows of x before
// the next tile is touched. One row is bound by memory bandwidth; eight cost little more.
#ifndef DECODER_FLOATS_H_
#define DECODER_FLOATS_H_

#include <algorithm>

#include "simd.h"

namespace decoder {

// Dot products of R rows of x and M rows of w, each left as a vector still to be summed: partial[r * W + m].
template <int R, int M, typename T>
void tile(const float* x, const T* w, int64_t D, int64_t further, F32* partial) {
  // Into L2, which keeps more reads in flight than L1: rows `further` on, a line for each line used of this one.
  const T* ahead = w + further * D;
  F32 acc[R][M] = {};
  int64_t d = 0;
  for (; d + W <= D; d += W) {
    F32 wide[M];
    for (int m = 0; m < M; ++m) {
      __builtin_prefetch(ahead + M * d + m * W, 0, 2);
      wide[m] = load(w + m * D + d);
    }
    for (int r = 0; r < R; ++r) {
      const F32 one = keep(load(x + r * D + d));
      for (int m = 0; m < M; ++m) acc[r][m] += one * wide[m];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) {
      for (int64_t e = d; e < D; ++e) acc[r][m][0] += x[r * D + e] * widen(w[m * D + e]);
      partial[r * W + m] = acc[r][m];
    }
  }
}

// R rows of x against `count` rows of w; results of a row of x lie `stride` after those of the one before.
template <int R, typename T>
void strip(const float* x, const T* w, int64_t count, int64_t D, bool alone, float* out, int64_t stride) {
  constexpr int M = W == 16 ? (R <= 4 ? 4 : 2) : R <= 2 ? 4 : 2;
  for (int64_t f = 0; f < count; f += W) {
    const int most = static_cast<int>(std::min<int64_t>(W, count - f));
    F32 partial[R * W];
    int m = 0;
    for (; m + M <= most; m += M) tile<R, M>(x, w + (f + m) * D, D, alone ? 2 * M : W, partial + m);
    for (; m < most; ++m) tile<R, 1>(x, w + (f + m) * D, D, alone ? 2 : W, partial + m);
    for (int r = 0; r < R; ++r) {
      const F32 total = sums(partial + r * W);
      std::memcpy(out + r * stride + f, &total, most * sizeof(float));
    }
  }
}

// Any number of rows of x against `count` rows of w.
template <typename T>
void float_rows(const float* x, int64_t rows, const T* w, int64_t count, int64_t D, float* out, int64_t stride) {
  constexpr int kMost = W == 16 ? 8 : 6;  // a tile's accumulators must fit the registers
  using Strip = void (*)(const float*, const T*, int64_t, int64_t, bool, float*, int64_t);
  static constexpr Strip kernels[] = {strip<1, T>, strip<2, T>, strip<3, T>, strip<4, T>,
                                      strip<5, T>, strip<6, T>, strip<7, T>, strip<8, T>};
  for (int64_t f = 0; f < count; f += W) {  // all rows meet a few rows of w while those are in the first-level cache
    const int64_t some = std::min<int64_t>(W, count - f);
    for (int64_t r = 0; r < rows; r += kMost) {
      float* const to = out + r * stride + f;
      kernels[std::min<int64_t>(rows - r, kMost) - 1](x + r * D, w + f * D, some, D, rows <= kMost, to, stride);
    }
  }
}

}  // namespace decoder

#endif  // DECODER_FLOATS_H_
