// A channel between a program that runs and the host that started it: what was drawn goes out, what may be drawn comes
// back. The program tells and goes on with its forward pass; the host thinks meanwhile; the program asks at the end.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace decoder {
namespace ffi = xla::ffi;

constexpr auto kPatience = std::chrono::seconds(60);  // for the host, which answers within milliseconds

struct Channel {
  std::mutex mutex;
  std::condition_variable changed;
  bool told = false, answered = false, over = false, closed = false;
  std::vector<int32_t> tokens, positions, lengths;
  std::vector<uint32_t> masks;
  std::vector<int8_t> ended;
};

std::mutex channels_mutex;
std::map<int32_t, std::shared_ptr<Channel>> channels;

std::shared_ptr<Channel> find(int32_t number) {
  std::lock_guard<std::mutex> lock(channels_mutex);
  const auto found = channels.find(number);
  return found == channels.end() ? nullptr : found->second;
}

std::vector<int32_t> values(const ffi::Buffer<ffi::S32>& buffer) {
  return {buffer.typed_data(), buffer.typed_data() + buffer.element_count()};
}

ffi::Error Tell(ffi::Buffer<ffi::S32> number, ffi::Buffer<ffi::S32> tokens, ffi::Buffer<ffi::S32> positions,
                ffi::Buffer<ffi::S32> lengths, ffi::ResultBuffer<ffi::S32> same) {
  const auto channel = find(*number.typed_data());
  if (!channel) return ffi::Error::InvalidArgument("tell: nobody listens");
  std::copy_n(tokens.typed_data(), tokens.element_count(), same->typed_data());
  std::lock_guard<std::mutex> lock(channel->mutex);
  channel->tokens = values(tokens);
  channel->positions = values(positions);
  channel->lengths = values(lengths);
  channel->told = true;
  channel->answered = false;
  channel->changed.notify_all();
  return ffi::Error::Success();
}

ffi::Error Ask(ffi::Buffer<ffi::S32> number, ffi::AnyBuffer, ffi::ResultBuffer<ffi::U32> masks,
               ffi::ResultBuffer<ffi::S8> ended) {
  const auto channel = find(*number.typed_data());
  if (!channel) return ffi::Error::InvalidArgument("ask: nobody listens");
  std::unique_lock<std::mutex> lock(channel->mutex);
  if (!channel->changed.wait_for(lock, kPatience, [&] { return channel->answered || channel->closed; })) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, "ask: the host did not say what may be drawn");
  }
  if (channel->closed) {
    std::fill_n(masks->typed_data(), masks->element_count(), ~0u);
    std::fill_n(ended->typed_data(), ended->element_count(), int8_t{1});
    return ffi::Error::Success();
  }
  if (channel->masks.size() != masks->element_count() || channel->ended.size() != ended->element_count()) {
    return ffi::Error::InvalidArgument("ask: the answer has another shape");
  }
  std::copy(channel->masks.begin(), channel->masks.end(), masks->typed_data());
  std::copy(channel->ended.begin(), channel->ended.end(), ended->typed_data());
  return ffi::Error::Success();
}

ffi::Error Over(ffi::Buffer<ffi::S32> number, ffi::Buffer<ffi::S32> count, ffi::ResultBuffer<ffi::S32> same) {
  std::copy_n(count.typed_data(), count.element_count(), same->typed_data());
  if (const auto channel = find(*number.typed_data())) {
    std::lock_guard<std::mutex> lock(channel->mutex);
    channel->over = true;
    channel->changed.notify_all();
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecoderTell, Tell,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(DecoderAsk, Ask,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U32>>().Ret<ffi::Buffer<ffi::S8>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(DecoderOver, Over,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

}  // namespace decoder

// What the host calls, by ctypes.
extern "C" {

void decoder_channel_open(int32_t number) {
  std::lock_guard<std::mutex> lock(decoder::channels_mutex);
  decoder::channels[number] = std::make_shared<decoder::Channel>();
}

void decoder_channel_close(int32_t number) {  // whoever asks from now on is told that every row has ended
  if (const auto channel = decoder::find(number)) {
    std::lock_guard<std::mutex> lock(channel->mutex);
    channel->closed = true;
    channel->changed.notify_all();
  }
}

void decoder_channel_forget(int32_t number) {
  std::lock_guard<std::mutex> lock(decoder::channels_mutex);
  decoder::channels.erase(number);
}

// 1: `count` tokens, their positions and the lengths of `rows` rows were told; 0: nothing within the time; -1: the
// program is over.
int decoder_channel_hear(int32_t number, int32_t* tokens, int32_t* positions, int32_t* lengths, int64_t count,
                         int64_t rows, int64_t milliseconds) {
  const auto channel = decoder::find(number);
  if (!channel) return -1;
  std::unique_lock<std::mutex> lock(channel->mutex);
  channel->changed.wait_for(lock, std::chrono::milliseconds(milliseconds),
                            [&] { return channel->told || channel->over; });
  if (!channel->told) return channel->over ? -1 : 0;
  channel->told = false;
  std::copy_n(channel->tokens.begin(), std::min<int64_t>(count, channel->tokens.size()), tokens);
  std::copy_n(channel->positions.begin(), std::min<int64_t>(count, channel->positions.size()), positions);
  std::copy_n(channel->lengths.begin(), std::min<int64_t>(rows, channel->lengths.size()), lengths);
  return 1;
}

void decoder_channel_answer(int32_t number, const uint32_t* masks, int64_t words, const int8_t* ended, int64_t rows) {
  const auto channel = decoder::find(number);
  if (!channel) return;
  std::lock_guard<std::mutex> lock(channel->mutex);
  channel->masks.assign(masks, masks + words);
  channel->ended.assign(ended, ended + rows);
  channel->answered = true;
  channel->changed.notify_all();
}
}
