// Vectors as wide as the machine's, in the compiler's portable vector types: W floats, or 2·W int16, to a register.
// Only what those types cannot say (pairwise products, half floats, widening) is written per instruction set.
#ifndef DECODER_SIMD_H_
#define DECODER_SIMD_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace decoder {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define DECODER_AVX512 1
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DECODER_AVX2 1
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * W)));
typedef int32_t I32 __attribute__((vector_size(4 * W)));
typedef int16_t I16 __attribute__((vector_size(4 * W)));  // 2·W of them
typedef uint16_t U16 __attribute__((vector_size(4 * W)));
typedef int16_t Half __attribute__((vector_size(2 * W)));  // W of them

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

#define DECODER_INLINE __attribute__((always_inline))

// f(0), …, f(N − 1), each with its own constant. Where arrays of vectors are to live in registers a loop will not do:
// GCC unrolls it too late to see that every index is known.
template <typename F, int... I>
DECODER_INLINE inline void each(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F>
DECODER_INLINE inline void each(F f) {
  each(f, std::make_integer_sequence<int, N>());
}

inline F32 splat(float x) { return x - F32{}; }
inline I32 splat(int32_t x) { return x - I32{}; }

inline F32 load(const float* p) {
  F32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }

inline I32 load(const int32_t* p) {
  I32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Keeps a value that is used several times in a register: folded into each use it would be loaded as often.
template <typename V>
inline V keep(V v) {
#if defined(DECODER_AVX512)
  __asm__("" : "+v"(v));
#elif defined(DECODER_AVX2)
  __asm__("" : "+x"(v));
#endif
  return v;
}

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline float widen(F16 x) {
#if defined(DECODER_AVX512) || defined(DECODER_AVX2)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  float v;
  if (rest >= 0x7c00u) {  // infinity and NaN
    const uint32_t bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  const uint32_t bits = rest << 13;
  std::memcpy(&v, &bits, sizeof v);
  v *= 0x1p112f;  // moves the exponent's bias, and makes subnormals right
  return sign ? -v : v;
#endif
}

inline F32 load(const Bf16* p) {
#if defined(DECODER_AVX512)
  return (F32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(DECODER_AVX2)
  return (F32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  F32 v;
  for (int i = 0; i < W; ++i) v[i] = widen(p[i]);
  return v;
#endif
}

inline F32 load(const F16* p) {
#if defined(DECODER_AVX512)
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(DECODER_AVX2)
  return (F32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  F32 v;
  for (int i = 0; i < W; ++i) v[i] = widen(p[i]);
  return v;
#endif
}

// 2·W signed bytes.
inline I16 load_wide(const int8_t* p) {
#if defined(DECODER_AVX512)
  return (I16)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(DECODER_AVX2)
  return (I16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  I16 v;
  for (int i = 0; i < 2 * W; ++i) v[i] = p[i];
  return v;
#endif
}

inline F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }

// acc[i] += a[2i]·x[0] + a[2i+1]·x[1], x being the pair of int16 in `pair`.
inline void dot_pairs(I32& acc, I16 a, int32_t pair) {
#if defined(DECODER_AVX512) && defined(__AVX512VNNI__)
  acc = (I32)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, _mm512_set1_epi32(pair));
#elif defined(DECODER_AVX512)
  acc = keep(acc + (I32)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(pair)));
#elif defined(DECODER_AVX2)
  // By name, or GCC reorders whole chains of sums and runs out of registers.
  const I32 products = (I32)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(pair));
  __asm__("vpaddd %1, %0, %0" : "+x"(acc) : "x"(products));
#else
  const int32_t low = (int16_t)(pair & 0xffff), high = pair >> 16;
  const I32 both = (I32)a;
  acc += ((both << 16) >> 16) * low + (both >> 16) * high;
#endif
}

// One level of a transposing sum: pairs of neighbouring blocks of L/2 lanes are added, those of a and b by turns.
template <int L, int... I>
inline F32 fold(F32 a, F32 b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I % L < L / 2 ? I : I - L / 2 + W)...) +
         __builtin_shufflevector(a, b, (I % L < L / 2 ? I + L / 2 : I + W)...);
}
template <int L>
inline void fold_all(F32* v) {
  for (int i = 0; i < L / 2; ++i) v[i] = fold<L>(v[i], v[i + L / 2], std::make_integer_sequence<int, W>());
  if constexpr (L > 2) fold_all<L / 2>(v);
}

// The sums of W vectors, in order; v is used up.
inline F32 sums(F32* v) {
  fold_all<W>(v);
  return v[0];
}

inline F32 max(F32 a, F32 b) { return a > b ? a : b; }

inline F32 min(F32 a, F32 b) { return a < b ? a : b; }

inline float largest(F32 v) {
  float most = v[0];
  for (int i = 1; i < W; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

template <typename V>
inline auto added(V v) {
  auto total = v[0];
  for (int i = 1; i < W; ++i) total += v[i];
  return total;
}

inline bool some(I32 where) {
  int32_t either = 0;
  for (int i = 0; i < W; ++i) either |= where[i];
  return either != 0;
}

inline F32 select(I32 where, F32 yes, F32 no) { return where ? yes : no; }

// exp(x) for x ≤ 0, within 2e-7 of it, 0 below −87: x = n·ln 2 + r and a polynomial in r.
inline F32 exp_negative(F32 x) {
  const F32 clamped = max(splat(-87.0f), x);  // in this order, so that NaN stays NaN
  const F32 n_real = clamped * 1.44269504f - 0.5f;
  const I32 n = __builtin_convertvector(n_real, I32);  // towards zero: the nearest integer, as n_real ≤ −0.5
  const F32 n_float = to_float(n);
  const F32 r = (clamped - n_float * 0.693359375f) + n_float * 2.12194440e-4f;
  F32 p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const I32 scale = (n + 127) << 23;
  return select(x < -87.0f, F32{}, p * (F32)scale);
}

}  // namespace decoder

#endif  // DECODER_SIMD_H_
