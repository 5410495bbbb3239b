// Few rows times one or more matrices, with what comes before and after them in a transformer's layer:
//
//   x, or rms_norm(x)  →  x·w₀ᵀ, x·w₁ᵀ, …   or   silu(x·w₀ᵀ) · x·w₁ᵀ   or   residual + x·w₀ᵀ
//
// One call for all of it, because decoding waits for memory: between two calls nothing is read. Work is cut into
// ranges of outputs that shrink towards the end, so that each thread streams long stretches and all end together.
#include <algorithm>
#include <vector>

#include "floats.h"
#include "quantised.h"
#include "team.h"

namespace decoder {
namespace ffi = xla::ffi;

constexpr int64_t kFloat32 = 4, kBfloat16 = 5;  // after the kinds of quantised.h
constexpr int64_t kLeastBytes = 8 << 10;        // of a range: streaming it takes about as long as handing it out
constexpr int64_t kMostBytes = 160 << 10;       // of a range that several blocks of rows meet
constexpr int64_t kRows = 32;                   // of a block: they stay in the caches while a range passes
constexpr int64_t kBlock = 4 * kStripe;         // outputs of a gate kept while their partners are computed
constexpr int64_t kShared = 3;                  // rows; preparing fewer takes less time than calling another thread

constexpr bool is_float(int64_t kind) { return kind >= kFloat32; }

struct Operand {
  int64_t kind, F, D;
  Weight parts;  // for float kinds only its `values`

  int64_t row_bytes() const { return is_float(kind) ? D * (kind == kFloat32 ? 4 : 2) : stripe_bytes(kind, D) / kStripe; }
};

struct Input {
  int64_t rows, D;
  const float* floats;
  const Rows* groups;  // null if no operand is quantised
};

// Outputs f … f + count − 1 of the rows first … last − 1: out[r * stride + i] is output f + i of row r.
void multiply(const Input& x, int64_t first, int64_t last, const Operand& w, int64_t f, int64_t count, float* out,
              int64_t stride) {
  const auto quantised = [&](auto kind) {
    quantised_rows<decltype(kind)::value>(*x.groups, first, last, w.parts, f, count, out, stride);
  };
  const auto floats = [&](auto* values) {
    float_rows(x.floats + first * x.D, last - first, values + f * w.D, count, w.D, out + first * stride, stride);
  };
  switch (w.kind) {
    case kInt8: return quantised(std::integral_constant<int64_t, kInt8>());
    case kQ8_0: return quantised(std::integral_constant<int64_t, kQ8_0>());
    case kQ4_0: return quantised(std::integral_constant<int64_t, kQ4_0>());
    case kQ4_1: return quantised(std::integral_constant<int64_t, kQ4_1>());
    case kFloat32: return floats(reinterpret_cast<const float*>(w.parts.values));
    default: return floats(reinterpret_cast<const Bf16*>(w.parts.values));
  }
}

// x / rms(x) · weight, for one row.
void normalise(const float* x, const float* weight, int64_t D, float epsilon, float* out) {
  F32 squares = {};
  int64_t d = 0;
  for (; d + W <= D; d += W) squares += load(x + d) * load(x + d);
  float sum = added(squares);
  for (; d < D; ++d) sum += x[d] * x[d];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(D) + epsilon);
  for (d = 0; d + W <= D; d += W) store(out + d, load(x + d) * factor * load(weight + d));
  for (; d < D; ++d) out[d] = x[d] * factor * weight[d];
}

inline F32 silu(F32 x) {
  const F32 e = exp_negative(select(x < 0.0f, x, -x));
  return x * (select(x < 0.0f, e, splat(1.0f)) / (e + 1.0f));
}

// to[i] = silu(gate[i]) · to[i]
void combine(const float* gate, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, silu(load(gate + i)) * load(to + i));
  if (i == count) return;
  F32 g = {}, u = {};
  std::memcpy(&g, gate + i, (count - i) * sizeof(float));
  std::memcpy(&u, to + i, (count - i) * sizeof(float));
  u *= silu(g);
  std::memcpy(to + i, &u, (count - i) * sizeof(float));
}

struct Range {
  const Operand* w;
  float* out;
  int64_t f, count;
};

// Cuts each operand's outputs into ranges of whole stripes, half of what is left for each thread in turn.
// Where rows come by blocks a range is small enough to stay in the second-level cache while all of them meet it.
void cut(const Operand& w, float* out, int64_t threads, int64_t together, int64_t rows, std::vector<Range>& ranges) {
  const int64_t bytes = std::max<int64_t>(1, w.row_bytes() * kStripe * together);
  const int64_t least = std::max<int64_t>(1, kLeastBytes / bytes), stripes = (w.F + kStripe - 1) / kStripe;
  const int64_t most = rows > kRows ? std::max<int64_t>(1, kMostBytes / bytes) : stripes;
  for (int64_t s = 0; s < stripes;) {
    const int64_t next = std::min(stripes, s + std::clamp((stripes - s) / (2 * threads), least, std::max(least, most)));
    ranges.push_back({&w, out, s * kStripe, std::min(w.F, next * kStripe) - s * kStripe});
    s = next;
  }
}

// Reads x as the operands want it: normalised where a norm is given, in int16 groups where one is quantised.
struct Prepared {
  std::vector<float> normed;
  Rows groups;

  Input from(ffi::ThreadPool& pool, const float* x, int64_t rows, int64_t D, const float* norm, float epsilon,
             bool quantised) {
    if (norm) normed.resize(rows * D);
    if (quantised) groups.resize(rows, D);
    float* const to = normed.data();
    Rows* const into = &groups;
    const auto prepare = [=](int64_t r) {
      const float* row = x + r * D;
      if (norm) {
        normalise(row, norm, D, epsilon, to + r * D);
        row = to + r * D;
      }
      if (!quantised) return;
      for (int64_t g = 0; g < into->groups; ++g) into->set(r * into->groups + g, row + g * kGroup);
    };
    if (rows > kShared) share(pool, rows, prepare);
    else for (int64_t r = 0; r < rows; ++r) prepare(r);
    return {rows, D, norm ? to : x, quantised ? into : nullptr};
  }
};

void run_gated(const Input& x, int64_t first, int64_t last, const Operand& up, const Range& range) {
  static thread_local std::vector<float> gate;
  gate.resize(x.rows * kBlock);
  const Operand& w = *range.w;
  for (int64_t f = range.f; f < range.f + range.count; f += kBlock) {
    const int64_t count = std::min(kBlock, range.f + range.count - f);
    multiply(x, first, last, w, f, count, gate.data(), kBlock);
    multiply(x, first, last, up, f, count, range.out + f, w.F);
    for (int64_t r = first; r < last; ++r) combine(gate.data() + r * kBlock, range.out + r * w.F + f, count);
  }
}

void run_plain(const Input& x, int64_t first, int64_t last, const float* residual, const Range& range) {
  const int64_t F = range.w->F;
  multiply(x, first, last, *range.w, range.f, range.count, range.out + range.f, F);
  if (!residual) return;
  for (int64_t r = first; r < last; ++r) {
    for (int64_t f = range.f; f < range.f + range.count; ++f) range.out[r * F + f] += residual[r * F + f];
  }
}

// Where the `number`-th of `parts` equal stretches of a buffer begins.
const uint8_t* stretch(const ffi::AnyBuffer& buffer, int64_t number, int64_t parts) {
  return static_cast<const uint8_t*>(buffer.untyped_data()) + buffer.size_bytes() / parts * number;
}

// The operands, from their buffers: one for floats, values, scales and minimums for the others. Of a buffer that holds
// `parts` weights, one after the other, the operand is the one whose number is given.
ffi::Error gather(ffi::RemainingArgs buffers, ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> parts,
                  const int32_t* numbers, int64_t D, std::vector<Operand>& found) {
  size_t at = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const int64_t kind = kinds[i], of = parts[i], number = numbers[i];
    if (of < 1 || number < 0 || number >= of) return ffi::Error::InvalidArgument("products: no part of that number");
    const size_t needed = is_float(kind) ? 1 : 3;
    if (at + needed > buffers.size()) return ffi::Error::InvalidArgument("products: weights and kinds disagree");
    const auto values = buffers.get<ffi::AnyBuffer>(at).value();
    Operand w{kind, 0, D, {0, D, stretch(values, number, of), nullptr, nullptr}};
    if (is_float(kind)) {
      const auto type = kind == kFloat32 ? ffi::F32 : ffi::BF16;
      if (values.element_type() != type) return ffi::Error::InvalidArgument("products: weights of another type");
      w.F = values.dimensions().front() / of;
    } else {
      w.parts.scales = stretch(buffers.get<ffi::AnyBuffer>(at + 1).value(), number, of);
      w.parts.minimums =
          reinterpret_cast<const F16*>(stretch(buffers.get<ffi::AnyBuffer>(at + 2).value(), number, of));
      const int64_t bytes = stripe_bytes(kind, D);
      if (D % kGroup || !bytes || values.size_bytes() % (bytes * of)) {
        return ffi::Error::InvalidArgument("products: inputs must divide by 32 and weights be striped");
      }
      w.F = values.size_bytes() / bytes / of * kStripe;  // stripes may be padded: the result says how many there are
    }
    found.push_back(w);
    at += needed;
  }
  return ffi::Error::Success();
}

ffi::Error Products(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm,
                    ffi::Buffer<ffi::F32> residual, ffi::Buffer<ffi::S32> numbers, ffi::RemainingArgs buffers,
                    ffi::RemainingRets outs, ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> parts,
                    float epsilon, bool gated) {
  const int64_t D = x.dimensions().back(), rows = x.element_count() / std::max<int64_t>(1, D);
  std::vector<Operand> operands;
  if (parts.size() != kinds.size() || numbers.element_count() != kinds.size()) {
    return ffi::Error::InvalidArgument("products: kinds, parts and their numbers disagree");
  }
  const ffi::Error error = gather(buffers, kinds, parts, numbers.typed_data(), D, operands);
  if (error.failure()) return error;
  if (outs.size() != (gated ? 1 : operands.size())) return ffi::Error::InvalidArgument("products: results missing");
  bool quantised = false;
  std::vector<Range> ranges;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto out = outs.get<ffi::AnyBuffer>(gated ? 0 : i).value();
    const int64_t F = out->dimensions().back(), held = operands[i].F;
    if (F > held || held >= F + kStripe) return ffi::Error::InvalidArgument("products: result of another size");
    operands[i].F = operands[i].parts.F = F;
    quantised |= !is_float(operands[i].kind);
    if (gated && i) continue;
    cut(operands[i], static_cast<float*>(out->untyped_data()), pool.num_threads(), gated ? 2 : 1, rows, ranges);
  }
  static thread_local Prepared prepared;
  const float* scale = norm.element_count() ? norm.typed_data() : nullptr;
  const float* added = residual.element_count() ? residual.typed_data() : nullptr;
  const Input input = prepared.from(pool, x.typed_data(), rows, D, scale, epsilon, quantised);
  share(pool, ranges.size(), [&](int64_t i) {
    for (int64_t r = 0; r < rows; r += kRows) {
      const int64_t last = std::min(rows, r + kRows);
      if (gated) run_gated(input, r, last, operands[1], ranges[i]);
      else run_plain(input, r, last, added, ranges[i]);
    }
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DecoderProducts, Products,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::S32>>().RemainingArgs().RemainingRets()
        .Attr<ffi::Span<const int64_t>>("kinds").Attr<ffi::Span<const int64_t>>("parts")
        .Attr<float>("epsilon").Attr<bool>("gated"));

}  // namespace decoder
