// bfloat16 weights in 12 bits, bit for bit.
//
// A weight's lower byte is noise, but its upper one, the sign and seven bits of the exponent, takes
// few values among the weights of one vector: it becomes the index into a table of 16. Reading
// weights is most of a forward of few rows, so this makes it faster by what it reads less.
//
// Eight inputs of a vector are a unit of three lines: the lower bytes of its first four inputs,
// those of its last four, and the indices, of the first four in the lower halves of the bytes. A
// unit with an upper byte that the vector's table lacks is odd: its upper bytes lie in a list.
#pragma once
#include "counts.h"
#include "tiles.h"

namespace aquiline {

// AMX reads whole tiles from memory, and narrower vectors would wait for their own instructions.
#define CAN_SQUEEZE (WIDE_VECTORS && !HAS_TILES)
constexpr int UNIT_INPUTS = 8, UNIT_LINES = 3;
constexpr int TABLE_SIZE = 16;

struct Squeezed {
  const uint8_t* tables;     // [vector][TABLE_SIZE] upper bytes; null: the weights are not squeezed
  const int32_t* odd_begin;  // [vector]: its first place in odd_units
  const int32_t* odd_units;  // ascending, -1 after a vector's last one
  const char* odd_lines;     // [odd unit][2] lines of upper bytes, without places for the -1
};

// Where the bytes of an element lie in a line: word 0 or 1 of a half, so that interleaving the
// lines of lower and upper bytes gives the words.
constexpr int squeezed_place(int word, int lane, int element) {
  return lane / 4 * 16 + word * 8 + lane % 4 * 2 + element;
}

// Squeezes a vector of `inputs` inputs from words of pairs; marks the odd units.
inline void squeeze(const Half* words, int inputs, uint8_t* out, uint8_t* table, uint8_t* odd) {
  int counts[256] = {};
  for (int i = 0; i < inputs * LANES; i++) counts[words[i] >> 8]++;
  int code[256];
  for (int& c : code) c = -1;
  for (int i = 0; i < TABLE_SIZE; i++) {
    int best = -1;
    for (int byte = 0; byte < 256; byte++)
      if (code[byte] < 0 && (best < 0 || counts[byte] > counts[best])) best = byte;
    table[i] = (uint8_t)best;
    code[best] = i;
  }
  for (int u = 0; u < inputs / UNIT_INPUTS; u++, out += UNIT_LINES * LINE) {
    memset(out, 0, UNIT_LINES * LINE);
    odd[u] = 0;
    for (int w = 0; w < UNIT_INPUTS / 2; w++)
      for (int i = 0; i < LANES * 2; i++) {
        const Half value = words[((size_t)u * UNIT_INPUTS / 2 + w) * LANES * 2 + i];
        const int half = w / 2, place = squeezed_place(w % 2, i / 2, i % 2);
        out[half * LINE + place] = (uint8_t)value;
        const int index = code[value >> 8];
        if (index < 0)
          odd[u] = 1;
        else
          out[2 * LINE + place] |= (uint8_t)(index << (4 * half));
      }
  }
}

#if CAN_SQUEEZE
// Reads the units of a vector, in order.
class Unsqueezed {
 public:
  Unsqueezed() = default;
  Unsqueezed(const Squeezed& s, const char* weights, int v)
      : weights_(weights),
        table_(_mm512_maskz_broadcast_i32x4(
            (__mmask16)-1, _mm_loadu_si128((const __m128i*)(s.tables + (size_t)v * TABLE_SIZE)))),
        odd_(s.odd_units + s.odd_begin[v]),
        odd_lines_(s.odd_lines + (ptrdiff_t)(s.odd_begin[v] - v) * 2 * LINE) {}

  INLINE void fetch(size_t later) const {
    for (int i = 0; i < UNIT_LINES; i++) __builtin_prefetch(weights_ + i * LINE + later);
  }
  // The bytes of half a unit. Interleaving them gives its two words.
  INLINE __m512i lower(int half) const { return line(weights_, half); }
  INLINE __m512i upper(int half) const {
    if (__builtin_expect(*odd_ == unit_, 0)) return line(odd_lines_, half);
    const __m512i indices = line(weights_, 2);
    return _mm512_shuffle_epi8(
        table_,
        _mm512_and_si512(half ? _mm512_srli_epi16(indices, 4) : indices, _mm512_set1_epi8(0x0f)));
  }
  INLINE void next() {
    weights_ += UNIT_LINES * LINE;
    const bool odd = *odd_ == unit_++;
    odd_ += odd;
    odd_lines_ += odd * 2 * LINE;
  }

 private:
  static INLINE __m512i line(const char* from, int i) {
    return _mm512_loadu_si512(from + i * LINE);
  }
  const char* weights_ = nullptr;
  __m512i table_;
  const int32_t* odd_ = nullptr;  // the next odd unit
  const char* odd_lines_ = nullptr;
  int unit_ = 0;
};

// Writes the words of a vector.
inline void unsqueeze(Unsqueezed from, int inputs, char* words) {
  for (int i = 0; i < inputs; i += UNIT_INPUTS, from.next())
    for (int half = 0; half < 2; half++, words += 2 * LINE) {
      const __m512i lower = from.lower(half), upper = from.upper(half);
      _mm512_store_si512(words, _mm512_unpacklo_epi8(lower, upper));
      _mm512_store_si512(words + LINE, _mm512_unpackhi_epi8(lower, upper));
    }
}
#endif

}  // namespace aquiline
