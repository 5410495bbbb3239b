// Attention of a few query tokens over a long cache, read in place: flash-decoding on a CPU.
//
// Work is split over (row, key head, range of slots). Each range is folded into a running softmax, a chunk of slots at
// a time, all queries of the head meeting a chunk while it is in the first-level cache; ranges are merged at the end.
#include <algorithm>
#include <vector>

#include "simd.h"
#include "team.h"

namespace decoder {
namespace ffi = xla::ffi;

constexpr float kHidden = -1e30f;  // finite: −inf − −inf is NaN in the maximum of a query that sees nothing yet
constexpr int kChunk = 32;         // slots: with 64-wide float32 heads, keys and values of a chunk take 16 KiB
constexpr int64_t kRange = 128;    // fewest slots worth a range of their own
constexpr int64_t kAlone = 1 << 18;  // products below which another thread would come too late

struct Problem {
  int64_t B, T, N, K, S, H;  // axes as in decoder/types.py
  const float* q;            // [B, T, N, H]
  const int32_t *positions_BT, *kv_positions;
  int64_t views;  // how many tokens of a row see slots of their own: 1, kv_positions is [B, S]; T, it is [B, T, S]
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
  int64_t first, last;   // slots

  int64_t group() const { return N / K; }
  int64_t queries() const { return T * group(); }
  int64_t state() const { return H + 2; }  // floats of one query's softmax: peak, mass, value
};

inline I32 visible(const Problem& p, int32_t q, I32 kv) {
  I32 seen = (kv >= 0) & (kv <= q);
  if (p.window) seen &= (q - kv) < static_cast<int32_t>(p.window);
  return seen;
}

// Asks for what will be read soon, into L2, which keeps more reads in flight than L1.
inline void fetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

// Dot products of R queries with up to W keys, in order of keys; keys at or past `count` are not read. Meanwhile fetches
// as much from `ahead` on.
template <int R, typename T>
void score(const float* const* q, const T* k, int count, int64_t H, const T* ahead, F32* out) {
  constexpr int M = R >= 3 && W < 16 ? 2 : 4;  // sums must fit the registers
  F32 partial[R * W] = {};
  int s = 0;
  for (; s + M <= count; s += M) {
    F32 acc[R][M] = {};
    fetch(ahead + s * H, M * H * sizeof(T));
#pragma GCC unroll 1
    for (int64_t h = 0; h < H; h += W) {
      F32 key[M];
      each<M>([&](auto m) DECODER_INLINE { key[m] = keep(load(k + (s + m) * H + h)); });
      each<R>([&](auto r) DECODER_INLINE {
        const F32 one = keep(load(q[r] + h));
        each<M>([&](auto m) DECODER_INLINE { acc[r][m] += one * key[m]; });
      });
    }
    each<R>([&](auto r) DECODER_INLINE {
      each<M>([&](auto m) DECODER_INLINE { partial[r * W + s + m] = acc[r][m]; });
    });
  }
  for (; s < count; ++s) {
    for (int r = 0; r < R; ++r) {
      for (int64_t h = 0; h < H; h += W) partial[r * W + s] += load(q[r] + h) * load(k + s * H + h);
    }
  }
  for (int r = 0; r < R; ++r) out[r] = sums(partial + r * W);
}

// value[r] = value[r] · shrink[r] + Σ_s weight[r, s] · v[s]. Meanwhile fetches as much from `ahead` on.
template <int R, typename T>
void blend(float* const* value, const float* shrink, const float (*weight)[kChunk], const T* v, int count, int64_t H,
           const T* ahead) {
  constexpr int M = W == 16 ? 4 : 2;
  int64_t h = 0;
  const auto columns = [&](auto width) {
    constexpr int C = decltype(width)::value;
    F32 acc[R][C];
    each<R>([&](auto r) DECODER_INLINE {
      each<C>([&](auto c) DECODER_INLINE { acc[r][c] = load(value[r] + h + c * W) * shrink[r]; });
    });
#pragma GCC unroll 1
    for (int s = 0; s < count; ++s) {
      F32 row[C];
      __builtin_prefetch(ahead + s * H + h, 0, 2);
      each<C>([&](auto c) DECODER_INLINE { row[c] = keep(load(v + s * H + h + c * W)); });
      each<R>([&](auto r) DECODER_INLINE {
        const F32 one = keep(splat(weight[r][s]));
        each<C>([&](auto c) DECODER_INLINE { acc[r][c] += one * row[c]; });
      });
    }
    each<R>([&](auto r) DECODER_INLINE {
      each<C>([&](auto c) DECODER_INLINE { store(value[r] + h + c * W, acc[r][c]); });
    });
    h += C * W;
  };
  while (h + M * W <= H) columns(std::integral_constant<int, M>());
  while (h < H) columns(std::integral_constant<int, 1>());
}

// Positions of up to W slots, −1 past `count`.
inline I32 held(const int32_t* positions, int count) {
  if (count >= W) return load(positions);
  I32 kv = splat(-1);
  for (int e = 0; e < count; ++e) kv[e] = positions[e];
  return kv;
}

// Folds `count` ≤ kChunk slots, from `first` on, into the softmax of R queries, numbers i … i + R − 1 of head `head`.
template <int R, typename T>
void fold_chunk(const Problem& p, int64_t b, int64_t head, int64_t i, const T* k, const T* v, int64_t first, int count,
                float* states) {
  const float* q[R];
  float *value[R], shrink[R], weight[R][kChunk];
  const int32_t* positions[R];
  int32_t position[R];
  for (int r = 0; r < R; ++r) {
    const int64_t t = (i + r) / p.group(), n = head * p.group() + (i + r) % p.group();
    q[r] = p.q + ((b * p.T + t) * p.N + n) * p.H;
    position[r] = p.positions_BT[b * p.T + t];
    positions[r] = p.kv_positions + (b * p.views + (p.views > 1 ? t : 0)) * p.S + first;
    value[r] = states + (i + r) * p.state() + 2;
  }
  I32 seen[R][kChunk / W], any = {};
  for (int s = 0; s < kChunk; s += W) {
    I32 kv = {};
    for (int r = 0; r < R; ++r) {
      if (r == 0 || positions[r] != positions[r - 1]) kv = held(positions[r] + s, count - s);
      any |= seen[r][s / W] = visible(p, position[r], kv);
    }
  }
  if (!some(any)) return;
  F32 peak[R];
  for (int r = 0; r < R; ++r) peak[r] = splat(kHidden);
  for (int s = 0; s < count; s += W) {
    F32 scores[R];
    score<R>(q, k + s * p.H, std::min(W, count - s), p.H, v + s * p.H, scores);
    for (int r = 0; r < R; ++r) {
      F32 scaled = scores[r] * p.scale;
      if (p.softcap != 0) {
        for (int e = 0; e < W; ++e) scaled[e] = p.softcap * std::tanh(scaled[e] / p.softcap);
      }
      scaled = select(seen[r][s / W], scaled, splat(kHidden));
      store(weight[r] + s, scaled);
      peak[r] = max(peak[r], scaled);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* state = value[r] - 2;
    const float now = std::max(state[0], largest(peak[r]));
    F32 mass = {};
    for (int s = 0; s < count; s += W) {
      const F32 w = select(seen[r][s / W], exp_negative(load(weight[r] + s) - now), F32{});
      store(weight[r] + s, w);
      mass += w;
    }
    shrink[r] = std::exp(state[0] - now);
    F32 lanes[W] = {mass};
    state[1] = state[1] * shrink[r] + sums(lanes)[0];
    state[0] = now;
  }
  blend<R>(value, shrink, weight, v, count, p.H, k + kChunk * p.H);
}

template <typename T>
void fold_range(const Problem& p, const T* k, const T* v, int64_t b, int64_t head, int64_t from, int64_t to,
                float* states) {
  for (int64_t i = 0; i < p.queries(); ++i) {
    float* state = states + i * p.state();
    state[0] = kHidden;
    std::fill(state + 1, state + p.state(), 0.0f);
  }
  for (int64_t s = from; s < to; s += kChunk) {
    const int count = static_cast<int>(std::min<int64_t>(kChunk, to - s));
    const int64_t offset = ((b * p.K + head) * p.S + s) * p.H;
    int64_t i = 0;
    const auto fold = [&](auto rows) {
      constexpr int R = decltype(rows)::value;
      for (; i + R <= p.queries(); i += R) {
        fold_chunk<R>(p, b, head, i, k + offset, v + offset, s, count, states);
      }
    };
    fold(std::integral_constant<int, 4>());
    fold(std::integral_constant<int, 3>());
    fold(std::integral_constant<int, 2>());
    fold(std::integral_constant<int, 1>());
  }
}

// Merges the ranges of one (row, head) and writes its queries' results.
void finish(const Problem& p, const float* states, int64_t ranges, int64_t b, int64_t head, float* out) {
  for (int64_t i = 0; i < p.queries(); ++i) {
    const int64_t t = i / p.group(), n = head * p.group() + i % p.group();
    float* to = out + ((b * p.T + t) * p.N + n) * p.H;
    const auto state = [&](int64_t range) { return states + (range * p.queries() + i) * p.state(); };
    float peak = kHidden, mass = 0;
    for (int64_t r = 0; r < ranges; ++r) peak = std::max(peak, state(r)[0]);
    std::fill(to, to + p.H, 0.0f);
    for (int64_t r = 0; r < ranges; ++r) {
      const float factor = std::exp(state(r)[0] - peak);
      mass += state(r)[1] * factor;
      for (int64_t h = 0; h < p.H; ++h) to[h] += state(r)[2 + h] * factor;
    }
    const float whole = mass > 0 ? mass : 1.0f;
    for (int64_t h = 0; h < p.H; ++h) to[h] /= whole;
  }
}

template <typename T>
void attend(ffi::ThreadPool& pool, const Problem& p, const T* k, const T* v, float* out) {
  const int64_t heads = p.B * p.K, slots = std::max<int64_t>(0, p.last - p.first);
  const bool alone = heads * slots * p.queries() * p.H < kAlone;
  const int64_t wanted = (4 * pool.num_threads() + heads - 1) / heads;  // several each, so that threads end together
  const int64_t ranges = alone ? 1 : std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, slots / kRange));
  const int64_t each = ((slots + ranges - 1) / ranges + kChunk - 1) / kChunk * kChunk, size = p.queries() * p.state();
  static thread_local std::vector<float> scratch;
  scratch.resize(heads * ranges * size);
  float* states = scratch.data();
  const auto work = [&, states](int64_t task) {
    const int64_t head = task / ranges, from = p.first + task % ranges * each;
    const int64_t to = std::min(from + each, p.last);
    fold_range(p, k, v, head / p.K, head % p.K, from, to, states + task * size);
  };
  if (alone) {
    for (int64_t task = 0; task < heads; ++task) work(task);
  } else {
    share(pool, heads * ranges, work);
  }
  for (int64_t h = 0; h < heads; ++h) finish(p, states + h * ranges * size, ranges, h / p.K, h % p.K, out);
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                  ffi::Buffer<ffi::S32> positions_BT, ffi::Buffer<ffi::S32> kv_positions, ffi::Buffer<ffi::S32> blocks,
                  ffi::ResultBuffer<ffi::F32> out, int64_t block, int64_t window, float scale, float softcap) {
  const auto of_q = q.dimensions(), of_k = k.dimensions();
  const int64_t S = of_k[2];
  const auto slot = [&](int i) { return std::clamp<int64_t>(blocks.typed_data()[i] * block, 0, S); };
  const Problem p{of_q[0], of_q[1], of_q[2], of_k[1], S, of_q[3], q.typed_data(), positions_BT.typed_data(),
                  kv_positions.typed_data(), kv_positions.dimensions().size() == 3 ? of_q[1] : 1, scale, softcap, window,
                  slot(0), slot(1)};
  if (kv_positions.element_count() != static_cast<size_t>(p.B * p.views * S)) {
    return ffi::Error::InvalidArgument("attend: positions of slots must be [B, S] or [B, T, S]");
  }
  if (p.H % W || k.element_type() != v.element_type()) {
    return ffi::Error::InvalidArgument("attend: head size must divide by 16, keys and values be of one type");
  }
  if (k.element_type() == ffi::F32) {
    attend(pool, p, static_cast<const float*>(k.untyped_data()), static_cast<const float*>(v.untyped_data()),
           out->typed_data());
  } else if (k.element_type() == ffi::BF16 || k.element_type() == ffi::U16) {
    attend(pool, p, static_cast<const Bf16*>(k.untyped_data()), static_cast<const Bf16*>(v.untyped_data()),
           out->typed_data());
  } else {
    return ffi::Error::InvalidArgument("attend: the cache must be float32, or bfloat16, also as uint16");
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DecoderAttend, Attend,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::Buffer<ffi::F32>>().Attr<int64_t>("block").Attr<int64_t>("window").Attr<float>("scale")
        .Attr<float>("softcap"));

}  // namespace decoder
