// Rows times a quantised matrix. Weights are striped (decoder/ops/quantised.py): 16 outputs lie side by side, so that
// a vector holds one pair of inputs for each of several outputs and sums need no shuffling.
//
// Activations become int16 in groups of 32, each with its own scale: an error of 1e-5, which 8 bits would not allow,
// and pairwise integer products then do two multiplications a lane, exactly. Scales meet sums once a group.
#ifndef DECODER_QUANTISED_H_
#define DECODER_QUANTISED_H_

#include <algorithm>
#include <vector>

#include "simd.h"

namespace decoder {

constexpr int kStripe = 16;  // outputs side by side
constexpr int kGroup = 32;   // inputs that share a scale
constexpr int kPairs = kGroup / 2;
constexpr int kParts = kStripe / W;  // vectors to a stripe

enum Kind : int64_t { kInt8 = 0, kQ8_0 = 1, kQ4_0 = 2, kQ4_1 = 3 };
constexpr bool is_8bit(int64_t kind) { return kind == kInt8 || kind == kQ8_0; }
constexpr int64_t stripe_bytes(int64_t kind, int64_t D) { return D * kStripe / (is_8bit(kind) ? 1 : 2); }

struct Rows {
  int64_t groups = 0;
  std::vector<int32_t> pairs;  // [rows, groups, kPairs], two int16 each
  std::vector<int32_t> total;  // [rows, groups], Σ of the int16
  std::vector<float> scale;    // [rows, groups]
  std::vector<float> sum;      // [rows, groups], Σ of the floats

  void resize(int64_t rows, int64_t D) {
    groups = D / kGroup;
    pairs.resize(rows * groups * kPairs);
    total.resize(rows * groups);
    scale.resize(rows * groups);
    sum.resize(rows * groups);
  }

  // One group of floats. Infinity and NaN end up in its scale, and so in every output of the row.
  void set(int64_t group, const float* x) {
    F32 most = {}, poison = {}, plain = {};
    for (int i = 0; i < kGroup; i += W) {
      const F32 v = load(x + i);
      most = max((F32)((I32)v & 0x7fffffff), most);
      poison += v * 0.0f;
      plain += v;
    }
    const float peak = largest(most), inverse = peak > 0 ? 32767.0f / peak : 0.0f;
    int16_t whole[kGroup];
    I32 all = {};
    for (int i = 0; i < kGroup; i += W) {
      const F32 bounded = min(max(load(x + i) * inverse, splat(-32767.0f)), splat(32767.0f));
      const I32 rounded = __builtin_convertvector(bounded + select(bounded < 0.0f, splat(-0.5f), splat(0.5f)), I32);
      const auto narrow = __builtin_convertvector(rounded, Half);
      std::memcpy(whole + i, &narrow, sizeof narrow);
      all += rounded;
    }
    std::memcpy(pairs.data() + group * kPairs, whole, sizeof whole);
    total[group] = added(all);
    scale[group] = peak / 32767.0f + added(poison);
    sum[group] = added(plain);
  }
};

struct Weight {
  int64_t F, D;
  const uint8_t* values;  // [stripes, groups, 512 or 256 bytes]
  const void* scales;     // F16 [stripes, groups, kStripe], or float [stripes, kStripe] for kInt8
  const F16* minimums;    // as scales
};

// One group of a stripe against R rows: integer sums.
template <int64_t kind, int R>
DECODER_INLINE inline void dot_group(const uint8_t* values, const int32_t* const (&pairs)[R], I32 (&acc)[R][kParts]) {
  constexpr int kAhead = 4096;
  const auto dot = [&](int j, const I16(&w)[kParts]) DECODER_INLINE {
    each<R>([&](auto r) DECODER_INLINE {
      each<kParts>([&](auto p) DECODER_INLINE { dot_pairs(acc[r][p], w[p], pairs[r][j]); });
    });
  };
  if constexpr (is_8bit(kind)) {
    constexpr int kTogether = R == 1 ? kPairs : 4;
#pragma GCC unroll 1  // unrolled by hand as far as it pays
    for (int j = 0; j < kPairs; j += kTogether) {
      each<kTogether>([&](auto i) DECODER_INLINE {
        const uint8_t* at = values + (j + i) * 2 * kStripe;
        if constexpr (i % 2 == 0) __builtin_prefetch(at + kAhead, 0, 2);
        I16 w[kParts];
        each<kParts>([&](auto p) DECODER_INLINE { w[p] = load_wide(reinterpret_cast<const int8_t*>(at + p * 2 * W)); });
        dot(j + i, w);
      });
    }
  } else {
#pragma GCC unroll 1
    for (int j = 0; j < kPairs; j += 4) {
      const uint8_t* at = values + j * kStripe;
      __builtin_prefetch(at + kAhead, 0, 2);
      U16 four[kParts];
      each<kParts>([&](auto p) DECODER_INLINE { std::memcpy(&four[p], at + p * sizeof(U16), sizeof(U16)); });
      each<4>([&](auto n) DECODER_INLINE {
        I16 w[kParts];
        each<kParts>([&](auto p) DECODER_INLINE {
          w[p] = (I16)((four[p] >> static_cast<uint16_t>(4 * n)) & static_cast<uint16_t>(15));
        });
        dot(j + n, w);
      });
    }
  }
}

// The 16 outputs of a stripe for R rows, the first being `row`: out[r * kParts + part].
template <int64_t kind, int R>
void stripe_of(const Rows& x, int64_t row, const Weight& w, int64_t stripe, F32* out) {
  const int64_t G = x.groups, bytes = stripe_bytes(kind, kGroup);
  const uint8_t* values = w.values + stripe * G * bytes;
  const auto* scales = static_cast<const F16*>(w.scales) + stripe * G * kStripe;
  const auto* minimums = w.minimums + stripe * G * kStripe;
  F32 sum[R][kParts] = {};
  for (int64_t g = 0; g < G; ++g) {
    const int64_t at = row * G + g;  // of row r: + r · G
    const int32_t* pairs[R];
    I32 acc[R][kParts];
    each<R>([&](auto r) DECODER_INLINE {
      pairs[r] = x.pairs.data() + (at + r * G) * kPairs;
      each<kParts>([&](auto p) DECODER_INLINE {
        acc[r][p] = is_8bit(kind) ? I32{} : splat(-8 * x.total[at + r * G]);
      });
    });
    dot_group<kind, R>(values + g * bytes, pairs, acc);
    each<kParts>([&](auto p) DECODER_INLINE {
      F32 scale = {}, middle = {};  // middle: what stored 8 stands for, so that the integers are small and signed
      if constexpr (kind != kInt8) scale = load(scales + g * kStripe + p * W);
      if constexpr (kind == kQ4_1) middle = load(minimums + g * kStripe + p * W) + scale * 8.0f;
      each<R>([&](auto r) DECODER_INLINE {
        const F32 mine = splat(x.scale[at + r * G]);
        if constexpr (kind == kInt8) sum[r][p] += to_float(acc[r][p]) * mine;
        else sum[r][p] += to_float(acc[r][p]) * (scale * mine);
        if constexpr (kind == kQ4_1) sum[r][p] += middle * x.sum[at + r * G];
      });
    });
  }
  each<kParts>([&](auto p) DECODER_INLINE {
    F32 whole = splat(1.0f);
    if constexpr (kind == kInt8) whole = load(static_cast<const float*>(w.scales) + stripe * kStripe + p * W);
    each<R>([&](auto r) DECODER_INLINE { out[r * kParts + p] = sum[r][p] * whole; });
  });
}

template <int64_t kind, int R>
void stripe_rows(const Rows& x, int64_t row, const Weight& w, int64_t stripe, float* out, int64_t stride) {
  F32 result[R * kParts];
  stripe_of<kind, R>(x, row, w, stripe, result);
  const int64_t count = std::min<int64_t>(kStripe, w.F - stripe * kStripe);
  for (int r = 0; r < R; ++r) std::memcpy(out + (row + r) * stride, result + r * kParts, count * sizeof(float));
}

// Rows first … last − 1 against outputs f … f + count − 1 of w, f a multiple of 16; out[r * stride + i] is output f + i
// of row r.
template <int64_t kind>
void quantised_rows(const Rows& x, int64_t first, int64_t last, const Weight& w, int64_t f, int64_t count, float* out,
                    int64_t stride) {
  constexpr int64_t kMost = W == 16 ? 8 : 4;  // sums must fit the registers
  using Kernel = void (*)(const Rows&, int64_t, const Weight&, int64_t, float*, int64_t);
  static constexpr Kernel kernels[] = {stripe_rows<kind, 1>, stripe_rows<kind, 2>, stripe_rows<kind, 3>,
                                       stripe_rows<kind, 4>, stripe_rows<kind, 5>, stripe_rows<kind, 6>,
                                       stripe_rows<kind, 7>, stripe_rows<kind, 8>};
  for (int64_t i = 0; i < count; i += kStripe) {
    for (int64_t r = first; r < last; r += kMost) {
      kernels[std::min(last - r, kMost) - 1](x, r, w, (f + i) / kStripe, out + i, stride);
    }
  }
}

}  // namespace decoder

#endif  // DECODER_QUANTISED_H_
