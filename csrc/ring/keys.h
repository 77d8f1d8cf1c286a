// Exactly-once publication: which sequence numbers of a producer were published.
//
// A window is an array of words (epoch << 32 | bitmap). Sequence number s has bit s % 32 of word
// (s / 32) % num_words, in epoch s / 32 / num_words. Marking a number of a later epoch replaces the
// word and so forgets numbers one window back: those are then "too old", never mistaken for new.
// One atomic store per mark, so a crash leaves the mark made or not made.
#pragma once

#include <atomic>
#include <cstdint>

#include "ring/layout.h"

namespace asyncrl::ring {

enum class KeyStatus { kNew, kPublished, kTooOld };

class KeyWindow {
 public:
  KeyWindow(std::atomic<uint64_t>* words, uint64_t window)
      : words_(words), num_words_(window / kKeysPerWord) {}

  KeyStatus Find(uint64_t seq) const {
    const uint64_t word = Peek(WordOf(seq));
    const uint64_t epoch = word >> 32;
    if (word == 0 || epoch < EpochOf(seq)) return KeyStatus::kNew;
    if (epoch > EpochOf(seq)) return KeyStatus::kTooOld;
    return (word & BitOf(seq)) ? KeyStatus::kPublished : KeyStatus::kNew;
  }

  // Marks `seq` as published; does nothing when it is already, or too old to be kept.
  void Mark(uint64_t seq) {
    if (Find(seq) != KeyStatus::kNew) return;
    std::atomic<uint64_t>& word = WordOf(seq);
    const uint64_t old = Peek(word);
    const uint64_t kept = (old >> 32) == EpochOf(seq) ? (old & 0xFFFFFFFFu) : 0;
    Publish(word, EpochOf(seq) << 32 | kept | BitOf(seq));
  }

 private:
  std::atomic<uint64_t>& WordOf(uint64_t seq) const {
    return words_[seq / kKeysPerWord % num_words_];
  }
  uint64_t EpochOf(uint64_t seq) const { return (seq / kKeysPerWord / num_words_) & 0xFFFFFFFFu; }
  static uint64_t BitOf(uint64_t seq) { return uint64_t{1} << (seq % kKeysPerWord); }

  std::atomic<uint64_t>* words_;
  uint64_t num_words_;
};

}  // namespace asyncrl::ring
