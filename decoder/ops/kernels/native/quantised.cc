// Rows times a quantised matrix. Weights are striped (decoder/ops/quantised.py): 16 outputs lie side by side, so that
// a vector holds one pair of inputs for each of 16 outputs and sums need no shuffling.
//
// Activations become int16 in groups of 32, each with its own scale: an error of 1e-5, which 8 bits would not allow,
// and pairwise integer products then do 32 multiplications an instruction, exactly. Scales meet sums once a group.
#include <algorithm>
#include <vector>

#include "simd.h"
#include "team.h"

namespace decoder {
namespace ffi = xla::ffi;

constexpr int kStripe = 16;  // outputs side by side
constexpr int kGroup = 32;   // inputs that share a scale
constexpr int kPairs = kGroup / 2;
constexpr int kMostRows = 8;
constexpr int64_t kChunkBytes = 64 << 10;

enum Kind : int64_t { kInt8 = 0, kQ8_0 = 1, kQ4_0 = 2, kQ4_1 = 3 };
constexpr bool is_8bit(int64_t kind) { return kind == kInt8 || kind == kQ8_0; }

struct Rows {
  int64_t groups;
  std::vector<int32_t> pairs;  // [rows, groups, kPairs], two int16 each
  std::vector<int32_t> total;  // [rows, groups], Σ of the int16
  std::vector<float> scale;    // [rows, groups]
  std::vector<float> sum;      // [rows, groups], Σ of the floats

  void resize(int64_t rows) {
    pairs.resize(rows * groups * kPairs);
    total.resize(rows * groups);
    scale.resize(rows * groups);
    sum.resize(rows * groups);
  }

  // Infinity and NaN end up in the group's scale, and so in every output of the row.
  void set(int64_t group, const float* x) {
    float most = 0, poison = 0, plain = 0;
    for (int i = 0; i < kGroup; ++i) {
      most = std::max(most, std::fabs(x[i]));
      poison += x[i] * 0.0f;
      plain += x[i];
    }
    const float inverse = most > 0 ? 32767.0f / most : 0.0f;
    int16_t whole[kGroup];
    int32_t all = 0;
    for (int i = 0; i < kGroup; ++i) {
      const float bounded = std::min(std::max(x[i] * inverse, -32767.0f), 32767.0f);
      whole[i] = static_cast<int16_t>(static_cast<int32_t>(bounded + std::copysign(0.5f, bounded)));
      all += whole[i];
    }
    std::memcpy(pairs.data() + group * kPairs, whole, sizeof whole);
    total[group] = all;
    scale[group] = most / 32767.0f + poison;
    sum[group] = plain;
  }
};

struct Weight {
  int64_t F, groups;
  const uint8_t* values;  // [stripes, groups, 512 or 256 bytes]
  const void* scales;     // F16 [stripes, groups, kStripe], or float [stripes, kStripe] for kInt8
  const F16* minimums;    // as scales
};

// One group of W outputs against R rows: integer sums.
template <int64_t kind, int R>
inline void dot_group(const uint8_t* values, const int32_t* const* pairs, I32* acc) {
  if constexpr (is_8bit(kind)) {
    for (int j = 0; j < kPairs; ++j) {
      if (j % 2 == 0) __builtin_prefetch(values + j * 2 * kStripe + 4096, 0, 2);
      const I16 w = load_wide(reinterpret_cast<const int8_t*>(values + j * 2 * kStripe));
      for (int r = 0; r < R; ++r) acc[r] = dot_pairs(acc[r], w, pairs[r][j]);
    }
  } else {
    for (int j = 0; j < kPairs / 4; ++j) {
      __builtin_prefetch(values + j * 4 * kStripe + 4096, 0, 2);
      U16 four;
      std::memcpy(&four, values + j * 4 * kStripe, sizeof four);
      for (int n = 0; n < 4; ++n) {
        const I16 w = (I16)((four >> static_cast<uint16_t>(4 * n)) & static_cast<uint16_t>(15));
        for (int r = 0; r < R; ++r) acc[r] = dot_pairs(acc[r], w, pairs[r][4 * j + n]);
      }
    }
  }
}

// W outputs, from `part` of a stripe on, of R rows, the first being `row`.
template <int64_t kind, int R>
void outputs(const Rows& x, int64_t row, const Weight& w, int64_t stripe, int part, F32* out) {
  constexpr int kBytes = is_8bit(kind) ? kGroup * kStripe : kGroup * kStripe / 2;
  const int64_t G = w.groups;
  const uint8_t* values = w.values + stripe * G * kBytes + part * (is_8bit(kind) ? 2 : 4);
  const auto* scales = static_cast<const F16*>(w.scales) + stripe * G * kStripe + part;
  const auto* minimums = w.minimums + stripe * G * kStripe + part;
  F32 sum[R] = {};
  for (int64_t g = 0; g < G; ++g) {
    const int32_t* pairs[R];
    I32 acc[R];
    for (int r = 0; r < R; ++r) {
      pairs[r] = x.pairs.data() + ((row + r) * G + g) * kPairs;
      acc[r] = !is_8bit(kind) ? splat(-8 * x.total[(row + r) * G + g]) : I32{};
    }
    dot_group<kind, R>(values + g * kBytes, pairs, acc);
    F32 scale = {}, middle = {};  // middle: what stored 8 stands for, so that the integers are small and signed
    if constexpr (kind != kInt8) scale = load(scales + g * kStripe);
    if constexpr (kind == kQ4_1) middle = load(minimums + g * kStripe) + scale * 8.0f;
    for (int r = 0; r < R; ++r) {
      const float of_x = x.scale[(row + r) * G + g];
      if constexpr (kind == kInt8) sum[r] += to_float(acc[r]) * of_x;
      else sum[r] += to_float(acc[r]) * (scale * of_x);
      if constexpr (kind == kQ4_1) sum[r] += middle * x.sum[(row + r) * G + g];
    }
  }
  for (int r = 0; r < R; ++r) {
    out[r] = sum[r];
    if constexpr (kind == kInt8) out[r] *= load(static_cast<const float*>(w.scales) + stripe * kStripe + part);
  }
}

template <int64_t kind, int R>
void stripe_rows(const Rows& x, int64_t row, const Weight& w, int64_t stripe, float* out) {
  for (int part = 0; part < kStripe && stripe * kStripe + part < w.F; part += W) {
    F32 result[R];
    outputs<kind, R>(x, row, w, stripe, part, result);
    const int64_t f = stripe * kStripe + part, count = std::min<int64_t>(W, w.F - f);
    for (int r = 0; r < R; ++r) std::memcpy(out + (row + r) * w.F + f, &result[r], count * sizeof(float));
  }
}

template <int64_t kind>
void multiply(ffi::ThreadPool& pool, const float* data, int64_t rows, const Weight& w, float* out) {
  static thread_local Rows x;
  x.groups = w.groups;
  x.resize(rows);
  Rows& shared = x;
  const auto prepare = [&shared, data](int64_t i) {
    for (int64_t g = i * shared.groups; g < (i + 1) * shared.groups; ++g) shared.set(g, data + g * kGroup);
  };
  if (rows > kMostRows) {
    share(pool, rows, prepare);
  } else {
    for (int64_t r = 0; r < rows; ++r) prepare(r);
  }
  using Kernel = void (*)(const Rows&, int64_t, const Weight&, int64_t, float*);
  static constexpr Kernel kernels[] = {stripe_rows<kind, 1>, stripe_rows<kind, 2>, stripe_rows<kind, 3>,
                                       stripe_rows<kind, 4>, stripe_rows<kind, 5>, stripe_rows<kind, 6>,
                                       stripe_rows<kind, 7>, stripe_rows<kind, 8>};
  const int64_t stripes = (w.F + kStripe - 1) / kStripe, bytes = w.groups * kGroup * kStripe / (is_8bit(kind) ? 1 : 2);
  const int64_t each = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, bytes));
  share(pool, (stripes + each - 1) / each, [&](int64_t chunk) {
    for (int64_t s = chunk * each; s < std::min(stripes, (chunk + 1) * each); ++s) {
      for (int64_t r = 0; r < rows; r += kMostRows) {
        kernels[std::min<int64_t>(rows - r, kMostRows) - 1](shared, r, w, s, out);
      }
    }
  });
}

ffi::Error Quantised(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer values, ffi::AnyBuffer scales,
                     ffi::AnyBuffer minimums, ffi::ResultBuffer<ffi::F32> out, int64_t kind) {
  const int64_t D = x.dimensions().back(), F = out->dimensions().back();
  const Weight w{F, D / kGroup, static_cast<const uint8_t*>(values.untyped_data()), scales.untyped_data(),
                 static_cast<const F16*>(minimums.untyped_data())};
  const size_t bytes = ((F + kStripe - 1) / kStripe) * kStripe * D / (is_8bit(kind) ? 1 : 2);
  if (D % kGroup || values.size_bytes() != bytes) {
    return ffi::Error::InvalidArgument("quantised matmul: inputs must divide by 32 and weights be striped");
  }
  const int64_t rows = D ? x.element_count() / D : 0;
  const auto run = [&](auto chosen) {
    multiply<decltype(chosen)::value>(pool, x.typed_data(), rows, w, out->typed_data());
  };
  switch (kind) {
    case kInt8: run(std::integral_constant<int64_t, kInt8>()); break;
    case kQ8_0: run(std::integral_constant<int64_t, kQ8_0>()); break;
    case kQ4_0: run(std::integral_constant<int64_t, kQ4_0>()); break;
    case kQ4_1: run(std::integral_constant<int64_t, kQ4_1>()); break;
    default: return ffi::Error::InvalidArgument("quantised matmul: unknown kind");
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DecoderQuantised, Quantised,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>().Ret<ffi::Buffer<ffi::F32>>().Attr<int64_t>("kind"));

}  // namespace decoder
