// What compiled kernels call: conversions, elementary functions, matrix products, atomics and the loop over the grid.
// Scalar functions are branch-free, so that compilers vectorise the loops around them. No intrinsic without fallback.
#pragma once
// Few headers: reading them is most of the time of a compilation.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define CPU_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define CPU_VECTORIZE _Pragma("GCC ivdep")
#endif
#define CPU_INLINE static inline __attribute__((always_inline))

template <class T>
struct Unsigned;
template <>
struct Unsigned<int8_t> {
  using type = uint8_t;
};
template <>
struct Unsigned<int16_t> {
  using type = uint16_t;
};
template <>
struct Unsigned<int32_t> {
  using type = uint32_t;
};
template <>
struct Unsigned<int64_t> {
  using type = uint64_t;
};
template <>
struct Unsigned<bool> {
  using type = bool;
};

// An unsigned integer of so many bytes.
template <size_t N>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint64_t;
};

template <class To, class From>
CPU_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// A fused multiply-add, also where the hardware has none. Polynomials below do not need the exactness: see `mad`.
CPU_INLINE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CPU_INLINE double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }
#if defined(__FP_FAST_FMAF) || defined(__FMA__)
CPU_INLINE float mad(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CPU_INLINE double mad(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
CPU_INLINE float mad(float a, float b, float c) { return a * b + c; }
CPU_INLINE double mad(double a, double b, double c) { return a * b + c; }
#endif

// ---- 16-bit floats, as integers: exact widening, narrowing to nearest even. Narrowing a widened number gives its bits.

CPU_INLINE float from_bf16(uint16_t x) { return bits_as<float>((uint32_t)x << 16); }

CPU_INLINE uint16_t to_bf16(float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | ((u & 0xffffu) ? 0x40u : 0u);
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

CPU_INLINE float from_f16(uint16_t x) {
  const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, rest = (uint32_t)(x & 0x7fffu) << 13;
  const float number = bits_as<float>(rest) * bits_as<float>(0x77800000u);
  const uint32_t u = rest >= 0x0f800000u ? rest | 0x7f800000u : bits_as<uint32_t>(number);
  return bits_as<float>(u | sign);
}

CPU_INLINE uint16_t to_f16(float x) {
  const uint32_t u = bits_as<uint32_t>(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  const uint32_t small = bits_as<uint32_t>(bits_as<float>(a) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const uint32_t nan = 0x7c00u | ((a >> 13) & 0x3ffu) | ((a & 0x7fe000u) ? 0u : 0x200u);
  uint32_t r = a < 0x38800000u ? small : normal;
  r = a >= 0x477ff000u ? 0x7c00u : r;
  r = a > 0x7f800000u ? nan : r;
  return (uint16_t)(r | sign);
}

// An inexact float with an odd last bit, which is between the same two narrow numbers as x: rounding it again is rounding
// x once.
CPU_INLINE float to_odd(double x) {
  const float f = (float)x;
  const uint32_t away = __builtin_fabs((double)f) > __builtin_fabs(x), inexact = (double)f < x || (double)f > x;
  return bits_as<float>((bits_as<uint32_t>(f) - away) | inexact);
}

CPU_INLINE uint16_t to_bf16(double x) { return to_bf16(to_odd(x)); }
CPU_INLINE uint16_t to_f16(double x) { return to_f16(to_odd(x)); }
// Towards zero.
CPU_INLINE float toward_zero_f32(double x) {
  const float f = (float)x;
  return bits_as<float>(bits_as<uint32_t>(f) - (uint32_t)(__builtin_fabs((double)f) > __builtin_fabs(x)));
}
CPU_INLINE float toward_zero_f16(float x) {
  const uint16_t r = to_f16(x);
  return from_f16((uint16_t)(r - (__builtin_fabsf(from_f16(r)) > __builtin_fabsf(x))));
}
CPU_INLINE float toward_zero_bf16(float x) { return bits_as<float>(x != x ? 0x7fc00000u : bits_as<uint32_t>(x) & 0xffff0000u); }
CPU_INLINE float toward_zero_f16(double x) { return toward_zero_f16(to_odd(x)); }
CPU_INLINE float toward_zero_bf16(double x) { return toward_zero_bf16(to_odd(x)); }

template <class T>
CPU_INLINE float round_bf16(T x) { return from_bf16(to_bf16(x)); }
template <class T>
CPU_INLINE float round_f16(T x) { return from_f16(to_f16(x)); }

// ---- Integers. Division never traps: on GPUs it does not either, and lanes that a mask switches off still divide.

template <class T>
CPU_INLINE T div_s(T a, T b) { return b == 0 ? (T)0 : b == (T)-1 ? (T)(0 - a) : (T)(a / b); }
template <class T>
CPU_INLINE T rem_s(T a, T b) { return b == 0 || b == (T)-1 ? (T)0 : (T)(a % b); }
template <class T>
CPU_INLINE T div_u(T a, T b) {
  using U = typename Unsigned<T>::type;
  return b == 0 ? (T)0 : (T)((U)a / (U)b);
}
template <class T>
CPU_INLINE T rem_u(T a, T b) {
  using U = typename Unsigned<T>::type;
  return b == 0 ? (T)0 : (T)((U)a % (U)b);
}
CPU_INLINE int32_t mulhi_u(int32_t a, int32_t b) {
  return (int32_t)(((uint64_t)(uint32_t)a * (uint32_t)b) >> 32);
}
CPU_INLINE int64_t mulhi_u(int64_t a, int64_t b) {
  return (int64_t)(uint64_t)(((unsigned __int128)(uint64_t)a * (uint64_t)b) >> 64);
}
template <class T>
CPU_INLINE T min_(T a, T b) { return a < b ? a : b; }
template <class T>
CPU_INLINE T max_(T a, T b) { return a > b ? a : b; }
template <class T>
CPU_INLINE T abs_(T a) { return a < 0 ? (T)(0 - a) : a; }

// Truncation of a float to 64 bits. |x| < 2^63. AVX2 has no such conversion, but adding 1.5 * 2^52 to a double makes its
// low bits those of an integer: done twice, for both halves.
CPU_INLINE int64_t to_i64(float x) {
#if defined(__AVX512DQ__) || defined(__aarch64__)
  return (int64_t)x;
#else
  constexpr double round = 6755399441055744.0, two_to_32 = 4294967296.0;
  const double whole = (double)__builtin_truncf(x);
  const double shifted = mad(whole, 1 / two_to_32, round);
  const double rest = mad(shifted - round, -two_to_32, whole) + round;
  const uint64_t bias = bits_as<uint64_t>(round);
  return (int64_t)((bits_as<uint64_t>(shifted) << 32) + bits_as<uint64_t>(rest) - (bias << 32) - bias);
#endif
}

// ---- Floats: numbers win over NaN in min/maxnum, NaN wins in minimum/maximum.

template <class T>
CPU_INLINE T maxnum(T a, T b) {
  const T larger = a > b ? a : b;  // one instruction, unlike a branch on it
  return b == b ? larger : a;
}
template <class T>
CPU_INLINE T minnum(T a, T b) {
  const T smaller = a < b ? a : b;
  return b == b ? smaller : a;
}
template <class T>
CPU_INLINE T maximum(T a, T b) { return a != a ? a : (a > b ? a : b); }
template <class T>
CPU_INLINE T minimum(T a, T b) { return a != a ? a : (a < b ? a : b); }

// 2^n for integers n in [-252, 254], in two factors so that subnormal results and overflow come out right.
CPU_INLINE float times_two_to(float x, int32_t n) {
  const int32_t half = n >> 1;
  const float a = bits_as<float>((uint32_t)(half + 127) << 23);
  const float b = bits_as<float>((uint32_t)(n - half + 127) << 23);
  return x * a * b;
}

// exp(r) for |r| <= ln(2)/2.
CPU_INLINE float exp_near_zero(float r) {
  float p = 1.9841270e-4f;
  p = mad(p, r, 1.3888889e-3f);
  p = mad(p, r, 8.3333333e-3f);
  p = mad(p, r, 4.1666667e-2f);
  p = mad(p, r, 1.6666667e-1f);
  p = mad(p, r, 0.5f);
  p = mad(p, r, 1.0f);
  return mad(p, r, 1.0f);
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

CPU_INLINE float exp_(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float shifted = mad(x, 1.4426950408889634f, kRound);
  const float n = shifted - kRound;
  float r = mad(n, -0.693145751953125f, x);
  r = mad(n, -1.428606765330187e-6f, r);
  return times_two_to(exp_near_zero(r), bits_as<int32_t>(shifted) - bits_as<int32_t>(kRound));
}

CPU_INLINE float exp2_(float x) {
  x = x > 129.0f ? 129.0f : x;
  x = x < -151.0f ? -151.0f : x;
  const float shifted = x + kRound;
  const float r = (x - (shifted - kRound)) * 0.6931471805599453f;
  return times_two_to(exp_near_zero(r), bits_as<int32_t>(shifted) - bits_as<int32_t>(kRound));
}

struct Log {
  float exponent, f, tail;  // log(x) = exponent * ln(2) + f + tail
};

CPU_INLINE Log log_parts(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float scaled = tiny ? x * 8388608.0f : x;
  const uint32_t u = bits_as<uint32_t>(scaled) - 0x3f3504f3u;
  const int32_t e = (int32_t)u >> 23;
  const float m = bits_as<float>((u & 0x7fffffu) + 0x3f3504f3u);
  const float f = m - 1.0f, z = f * f;
  float p = 7.0376836292e-2f;
  p = mad(p, f, -1.1514610310e-1f);
  p = mad(p, f, 1.1676998740e-1f);
  p = mad(p, f, -1.2420140846e-1f);
  p = mad(p, f, 1.4249322787e-1f);
  p = mad(p, f, -1.6668057665e-1f);
  p = mad(p, f, 2.0000714765e-1f);
  p = mad(p, f, -2.4999993993e-1f);
  p = mad(p, f, 3.3333331174e-1f);
  return {(float)(e - (tiny ? 23 : 0)), f, mad(p * f, z, -0.5f * z)};
}

CPU_INLINE float log_special(float x, float y) {
  y = x == 0.0f ? -INFINITY : y;
  y = x < 0.0f ? NAN : y;
  return x < INFINITY ? y : x;
}

CPU_INLINE float log_(float x) {
  const Log l = log_parts(x);
  return log_special(x, mad(l.exponent, 0.693359375f, l.f + mad(l.exponent, -2.12194440e-4f, l.tail)));
}

CPU_INLINE float log2_(float x) {
  const Log l = log_parts(x);
  const float low = mad(l.tail, 0.44269504088896340736f, l.f * 0.44269504088896340736f);
  return log_special(x, ((low + l.tail) + l.f) + l.exponent);
}

CPU_INLINE double exp_(double x) { return __builtin_exp(x); }
CPU_INLINE double exp2_(double x) { return __builtin_exp2(x); }
CPU_INLINE double log_(double x) { return __builtin_log(x); }
CPU_INLINE double log2_(double x) { return __builtin_log2(x); }
#define CPU_FUNCTION(name)                                              \
  CPU_INLINE float name##_(float x) { return __builtin_##name##f(x); } \
  CPU_INLINE double name##_(double x) { return __builtin_##name(x); }
CPU_FUNCTION(ceil)
CPU_FUNCTION(cos)
CPU_FUNCTION(erf)
CPU_FUNCTION(fabs)
CPU_FUNCTION(floor)
CPU_FUNCTION(sin)
CPU_FUNCTION(sqrt)
CPU_INLINE float fmod_(float x, float y) { return __builtin_fmodf(x, y); }
CPU_INLINE double fmod_(double x, double y) { return __builtin_fmod(x, y); }
template <class T>
CPU_INLINE T rsqrt_(T x) { return (T)1 / sqrt_(x); }

CPU_INLINE float tanh_(float x) {
  const float a = fabs_(x);
  const float e = exp_(-2.0f * a);
  const float large = (1.0f - e) / (1.0f + e);
  // Below 0.3 the difference above cancels; an odd series does not.
  const float z = x * x;
  float p = -8.8632355e-3f;
  p = mad(p, z, 2.1869489e-2f);
  p = mad(p, z, -5.3968254e-2f);
  p = mad(p, z, 1.3333333e-1f);
  p = mad(p, z, -3.3333333e-1f);
  const float small = mad(p * z, a, a);
  const float y = a < 0.3f ? small : large;
  return x < 0 ? -y : (x != x ? x : y);
}
CPU_INLINE double tanh_(double x) { return __builtin_tanh(x); }

// ---- Matrix products. The order of every sum follows from the shapes alone: over k, or over k by lanes and then over
// the lanes. So a row's bits do not depend on the block's other rows or columns.
// Products and sums are fused where the hardware can, as on GPUs, also if `enable_fp_fusion` is off.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float vfloat __attribute__((vector_size(4 * kLanes)));
typedef float vfloat_u __attribute__((vector_size(4 * kLanes), aligned(4)));

CPU_INLINE vfloat vload(const float* p) { return *(const vfloat_u*)p; }
CPU_INLINE void vstore(float* p, vfloat v) { *(vfloat_u*)p = v; }
CPU_INLINE vfloat vfma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__) && defined(__clang__)
  return (vfloat)__builtin_ia32_vfmaddps512(a, b, c, 4);
#elif defined(__AVX512F__)
  return (vfloat)__builtin_ia32_vfmaddps512_mask(a, b, c, (unsigned short)-1, 4);
#elif defined(__FMA__) && defined(__AVX__)
  return (vfloat)__builtin_ia32_vfmaddps256(a, b, c);
#elif defined(__ARM_NEON)
  return (vfloat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// ---- Products of bf16 numbers in pairs, on processors that multiply them: in each lane C + A.low B.low + A.high B.high,
// sums in fp32, subnormal numbers taken for 0. A lane holds a word of two numbers where it otherwise holds one in fp32.

typedef uint32_t vword __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vword_u __attribute__((vector_size(4 * kLanes), aligned(2)));

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
// Assembly, because compilers disagree on the types of the intrinsic.
CPU_INLINE vfloat vfma(vword a, vword b, vfloat c) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
}
#else
constexpr bool kHasPairs = false;
CPU_INLINE vfloat vfma(vword, vword, vfloat c) { return c; }
#endif
CPU_INLINE vword vload(const uint32_t* p) { return *(const vword_u*)p; }
CPU_INLINE vfloat splat(float x) { return x - (vfloat){}; }
CPU_INLINE vword splat(uint32_t x) { return x - (vword){}; }

// ---- Where the right matrix of a product is: in an array of fp32 numbers or of pairs, or in rows anywhere in memory.

typedef uint16_t vshort_u __attribute__((vector_size(2 * kLanes), aligned(2)));

// Numbers of 16 bits, zeros before them. GCC makes five instructions of a conversion that is one.
CPU_INLINE vword widen(const uint16_t* p) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef short v16 __attribute__((vector_size(32), aligned(2)));
  typedef int v16i __attribute__((vector_size(64)));
  return (vword)__builtin_ia32_pmovzxwd512_mask(*(const v16*)p, (v16i){}, (unsigned short)-1);
#elif defined(__AVX2__) && !defined(__clang__)
  typedef short v8 __attribute__((vector_size(16), aligned(2)));
  return (vword)__builtin_ia32_pmovzxwd256(*(const v8*)p);
#else
  return __builtin_convertvector(*(const vshort_u*)p, vword);
#endif
}

struct Single {
  using memory = float;
  static vfloat load(const float* p) { return vload(p); }
  static float one(float x) { return x; }
};
struct Brain {
  using memory = uint16_t;
  static vfloat load(const uint16_t* p) { return (vfloat)(widen(p) << 16); }
  static float one(uint16_t x) { return from_bf16(x); }
};
struct Half {
  using memory = uint16_t;
  static vfloat load(const uint16_t* p) {
    const vword x = widen(p);
    const vword sign = (x & 0x8000u) << 16, rest = (x & 0x7fffu) << 13;
    const vfloat number = (vfloat)rest * bits_as<float>(0x77800000u);
    const vword special = (vword)(rest >= 0x0f800000u);
    return (vfloat)(sign | (special & (rest | 0x7f800000u)) | (~special & (vword)number));
  }
  static float one(uint16_t x) { return from_f16(x); }
};

template <int COLUMNS>
struct OrderedPairs {
  const uint32_t* p;
  vword at(int row, int column) const { return vload(p + row * COLUMNS + column); }
};
struct ScatteredPairs {
  const uint16_t* const* rows;
  vword at(int row, int column) const { return *(const vword_u*)(rows[row] + 2 * column); }
};
template <int COLUMNS>
struct Ordered {
  const float* p;
  vfloat at(int row, int column) const { return vload(p + row * COLUMNS + column); }
  float one(int row, int column) const { return p[row * COLUMNS + column]; }
};
template <class T>
struct Scattered {
  const typename T::memory* const* rows;
  vfloat at(int row, int column) const { return T::load(rows[row] + column); }
  float one(int row, int column) const { return T::one(rows[row][column]); }
};

// Asks for rows that lie anywhere, so that they are on their way before they are needed: no hardware foresees them.
template <int ROWS, int COLUMNS, class T>
CPU_INLINE void fetch_rows(const T* const* rows) {
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < COLUMNS * (int)sizeof(T); j += 64) __builtin_prefetch((const char*)rows[i] + j);
}

// C[MR][NV vectors] += A[MR][K] B[K][..]; everything stays in registers over k. Here and below K counts pairs where A and
// B are pairs.
template <int MR, int NV, int K, int N, class Left, class Right>
CPU_INLINE void dot_block(const Left* a, Right b, int column, float* c) {
  vfloat acc[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int n = 0; n < NV; n++) acc[m][n] = vload(c + m * N + n * kLanes);
  for (int k = 0; k < K; k++) {
    decltype(b.at(0, 0)) row[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; n++) row[n] = b.at(k, column + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      const auto xs = splat(a[m * K + k]);
#pragma GCC unroll 8
      for (int n = 0; n < NV; n++) acc[m][n] = vfma(xs, row[n], acc[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int n = 0; n < NV; n++) vstore(c + m * N + n * kLanes, acc[m][n]);
}

// Columns of a product that one block of MR rows computes at a time, in vectors: as many sums as registers hold, and
// more than a multiply-add takes cycles.
template <int MR>
constexpr int kBlockVectors = kLanes == 16 ? 6 : MR >= 3 ? 3 : MR == 2 ? 4 : 8;

template <int MR, int NV, int LEFT, int K, int N, class Left, class Right>
CPU_INLINE void dot_columns(const Left* a, Right b, int column, float* c) {
  constexpr int now = LEFT < NV ? LEFT : NV;
  dot_block<MR, now, K, N>(a, b, column, c);
  if constexpr (LEFT > now) dot_columns<MR, NV, LEFT - now, K, N>(a, b, column + now * kLanes, c + now * kLanes);
}

// C[M][N] += A[M][K] B[K][N].
template <int M, int N, int K, class Left, class Right>
static __attribute__((noinline)) void dot_f32(const Left* __restrict a, Right b, float* __restrict c) {
  if constexpr (N >= kLanes) {
    constexpr int MR = M % 4 == 0 ? 4 : M % 3 == 0 ? 3 : M % 2 == 0 ? 2 : 1;
    // Columns in pieces that are short enough to be unrolled, and whose part of B stays in the cache for all rows.
    constexpr int piece = N < 16 * kLanes ? N : 16 * kLanes;
    for (int n = 0; n < N; n += piece)
      for (int m = 0; m < M; m += MR)
        dot_columns<MR, kBlockVectors<MR>, piece / kLanes, K, N>(a + m * K, b, n, c + m * N + n);
  } else {
    for (int m = 0; m < M; m++)
      for (int k = 0; k < K; k++)
        for (int n = 0; n < N; n++) c[m * N + n] = mad(a[m * K + k], b.one(k, n), c[m * N + n]);
  }
}

// Sums of the lanes of kLanes vectors, in the vectors' order. Halves are added until there is one vector.
CPU_INLINE vfloat lane_sums(vfloat* v) {
#if defined(__AVX512F__)
#define CPU_FOLD(x, y, ...) (__builtin_shufflevector(x, y, __VA_ARGS__))
  for (int i = 0; i < 8; i++)
    v[i] = CPU_FOLD(v[2 * i], v[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           CPU_FOLD(v[2 * i], v[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  for (int i = 0; i < 4; i++)
    v[i] = CPU_FOLD(v[2 * i], v[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           CPU_FOLD(v[2 * i], v[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  for (int i = 0; i < 2; i++)
    v[i] = CPU_FOLD(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           CPU_FOLD(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  return CPU_FOLD(v[0], v[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         CPU_FOLD(v[0], v[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#undef CPU_FOLD
#elif defined(__AVX__)
  for (int i = 0; i < 4; i++)
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  for (int i = 0; i < 2; i++)
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  for (int i = 0; i < 2; i++)
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 4, 1, 5) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 6, 3, 7);
  return __builtin_shufflevector(v[0], v[1], 0, 1, 4, 5) + __builtin_shufflevector(v[0], v[1], 2, 3, 6, 7);
#endif
}

// C[M][N] += A[M][K] B[N][K]^T for few rows of A: without putting B in order, which would take longer than the sums.
template <int M, int N, int K, class Left, class Right>
static __attribute__((noinline)) void dot_rows(const Left* __restrict a, Right b, float* __restrict c) {
  // One vector of sums, or three rows by four.
  constexpr int MR = M % 3 == 0 ? 3 : M < kLanes ? M : kLanes, NR = MR == 3 ? 4 : kLanes / MR;
  constexpr int vectors = (MR * NR + kLanes - 1) / kLanes;
  if constexpr (M % MR == 0 && N % NR == 0 && K % kLanes == 0) {
    for (int m0 = 0; m0 < M; m0 += MR)
      for (int n0 = 0; n0 < N; n0 += NR) {
        vfloat acc[vectors * kLanes] = {};
        for (int k = 0; k < K; k += kLanes) {
          decltype(vload(a)) left[MR];
#pragma GCC unroll 16
          for (int m = 0; m < MR; m++) left[m] = vload(a + (m0 + m) * K + k);
#pragma GCC unroll 16
          for (int n = 0; n < NR; n++) {
            const auto row = b.at(n0 + n, k);
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++) acc[m * NR + n] = vfma(left[m], row, acc[m * NR + n]);
          }
        }
        float sums[vectors * kLanes];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) vstore(sums + i * kLanes, lane_sums(acc + i * kLanes));
#pragma GCC unroll 16
        for (int i = 0; i < MR * NR; i++) c[(m0 + i / NR) * N + n0 + i % NR] += sums[i];
      }
  } else {
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++) c[m * N + n] = mad(a[m * K + k], b.one(n, k), c[m * N + n]);
  }
}

// ---- The same for numbers that are bf16 numbers, as pairs where sizes and the processor have them. Arguments are fp32.

typedef uint16_t vpairs __attribute__((vector_size(4 * kLanes)));

// Two bf16 numbers that are fp32 numbers, as one word.
CPU_INLINE uint32_t pair_of(uint32_t low, uint32_t high) { return low >> 16 | (high & 0xffff0000u); }

// to[i] = the pair of from[2i] and from[2i + 1].
template <int N>
CPU_INLINE void pair_neighbours(const float* __restrict from, uint32_t* __restrict to) {
  CPU_VECTORIZE
  for (int i = 0; i < N / 2; i++) to[i] = pair_of(bits_as<uint32_t>(from[2 * i]), bits_as<uint32_t>(from[2 * i + 1]));
}

// to[k][n] = the pair of from[2k][n] and from[2k + 1][n].
template <int K, int N>
CPU_INLINE void pair_rows(const float* __restrict from, uint32_t* __restrict to) {
  for (int k = 0; k < K / 2; k++) {
    CPU_VECTORIZE
    for (int n = 0; n < N; n++)
      to[k * N + n] = pair_of(bits_as<uint32_t>(from[2 * k * N + n]), bits_as<uint32_t>(from[(2 * k + 1) * N + n]));
  }
}

// Numbers of both sides whose pairs a thread's stack surely holds.
constexpr int kMostPaired = 1 << 17;

// C[M][N] += A[M][K] B[K][N].
template <int M, int N, int K>
static __attribute__((noinline)) void dot_bf16(const float* __restrict a, Ordered<N> b, float* __restrict c) {
  if constexpr (kHasPairs && K % 2 == 0 && N % kLanes == 0 && M > 1 && (M + N) * K <= kMostPaired) {
    alignas(64) uint32_t left[M * K / 2];
    alignas(64) uint32_t right[K / 2 * N];
    pair_neighbours<M * K>(a, left);
    pair_rows<K, N>(b.p, right);
    dot_f32<M, N, K / 2>(left, OrderedPairs<N>{right}, c);
  } else {
    dot_f32<M, N, K>(a, b, c);
  }
}

// The same for rows of B anywhere in memory, 32 columns at a time. Numbers of two rows become pairs within 16 bytes, so
// one vector of sums has the first four columns of every eight, and another one the last four.
template <int M, int N, int K>
static __attribute__((noinline)) void dot_bf16(const float* __restrict a, Scattered<Brain> b, float* __restrict c) {
#if defined(__AVX512BF16__)
  if constexpr (K % 2 == 0 && N % 32 == 0) {
    constexpr int MR = M % 4 == 0 ? 4 : M % 3 == 0 ? 3 : M % 2 == 0 ? 2 : 1;
    alignas(64) uint32_t left[M * K / 2];
    pair_neighbours<M * K>(a, left);
    for (int n = 0; n < N; n += 32)
      for (int m0 = 0; m0 < M; m0 += MR) {
        vfloat low[MR], high[MR];
#pragma GCC unroll 4
        for (int m = 0; m < MR; m++) {
          const vfloat c0 = vload(c + (m0 + m) * N + n), c1 = vload(c + (m0 + m) * N + n + 16);
          low[m] = __builtin_shufflevector(c0, c1, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
          high[m] = __builtin_shufflevector(c0, c1, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
        }
        for (int k = 0; k < K / 2; k++) {
          const vpairs r0 = (vpairs)*(const vword_u*)(b.rows[2 * k] + n);
          const vpairs r1 = (vpairs)*(const vword_u*)(b.rows[2 * k + 1] + n);
          const vword first = (vword)__builtin_shufflevector(
              r0, r1, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50, 19, 51, 24, 56,
              25, 57, 26, 58, 27, 59);
          const vword second = (vword)__builtin_shufflevector(
              r0, r1, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22, 54, 23, 55, 28,
              60, 29, 61, 30, 62, 31, 63);
#pragma GCC unroll 4
          for (int m = 0; m < MR; m++) {
            const vword both = splat(left[(m0 + m) * (K / 2) + k]);
            low[m] = vfma(both, first, low[m]);
            high[m] = vfma(both, second, high[m]);
          }
        }
#pragma GCC unroll 4
        for (int m = 0; m < MR; m++) {
          float* out = c + (m0 + m) * N + n;
          vstore(out, __builtin_shufflevector(low[m], high[m], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
          vstore(out + 16,
                 __builtin_shufflevector(low[m], high[m], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
        }
      }
    return;
  }
#endif
  dot_f32<M, N, K>(a, b, c);
}

// C[M][N] += A[M][K] B[N][K]^T for few rows of A, with rows of B anywhere in memory.
template <int M, int N, int K>
static __attribute__((noinline)) void dot_rows_bf16(const float* __restrict a, Scattered<Brain> b, float* __restrict c) {
  constexpr int MR = M % 3 == 0 ? 3 : M < kLanes ? M : kLanes, NR = MR == 3 ? 4 : kLanes / MR;
  if constexpr (kHasPairs && M % MR == 0 && N % NR == 0 && K % (2 * kLanes) == 0) {
    alignas(64) uint32_t pairs[M * K / 2];
    pair_neighbours<M * K>(a, pairs);
    dot_rows<M, N, K / 2>(pairs, ScatteredPairs{b.rows}, c);
  } else {
    dot_rows<M, N, K>(a, b, c);
  }
}

template <int M, int N, int K, class A, class B, class C>
static void dot_any(const A* a, const B* b, C* c) {
  for (int m = 0; m < M; m++)
    for (int k = 0; k < K; k++)
      for (int n = 0; n < N; n++) c[m * N + n] += (C)a[m * K + k] * (C)b[k * N + n];
}

// to[C][R] = from[R][C] transposed, by tiles that stay in registers.
template <int R, int C>
static __attribute__((noinline)) void transpose(const float* __restrict from, float* __restrict to) {
#if defined(__AVX__)
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v8u __attribute__((vector_size(32), aligned(4)));
  if constexpr (R % 8 == 0 && C % 8 == 0) {
    for (int i = 0; i < R; i += 8)
      for (int j = 0; j < C; j += 8) {
        const float* f = from + i * C + j;
        float* t = to + j * R + i;
        v8 r[8], s[8];
        for (int k = 0; k < 8; k++) r[k] = *(const v8u*)(f + k * C);
        for (int k = 0; k < 8; k += 2) {
          s[k] = __builtin_shufflevector(r[k], r[k + 1], 0, 8, 1, 9, 4, 12, 5, 13);
          s[k + 1] = __builtin_shufflevector(r[k], r[k + 1], 2, 10, 3, 11, 6, 14, 7, 15);
        }
        for (int k = 0; k < 8; k += 4) {
          r[k] = __builtin_shufflevector(s[k], s[k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
          r[k + 1] = __builtin_shufflevector(s[k], s[k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
          r[k + 2] = __builtin_shufflevector(s[k + 1], s[k + 3], 0, 1, 8, 9, 4, 5, 12, 13);
          r[k + 3] = __builtin_shufflevector(s[k + 1], s[k + 3], 2, 3, 10, 11, 6, 7, 14, 15);
        }
        for (int k = 0; k < 4; k++) {
          *(v8u*)(t + k * R) = __builtin_shufflevector(r[k], r[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
          *(v8u*)(t + (k + 4) * R) = __builtin_shufflevector(r[k], r[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        }
      }
    return;
  }
#endif
  for (int i = 0; i < R; i += 4)
    for (int j = 0; j < C; j++)
      for (int k = i; k < (i + 4 < R ? i + 4 : R); k++) to[j * R + k] = from[k * C + j];
}

// ---- Masks of up to 32 elements as bits.

template <int N>
constexpr uint32_t all_bits = (uint32_t)((UINT64_C(1) << N) - 1);

template <int N>
CPU_INLINE uint32_t bits_of(const uint8_t* on) {
  uint32_t bits = 0;
  for (int i = 0; i < N; i += 8) {
    uint64_t word;
    memcpy(&word, on + i, 8);
    // Eight bytes that are 0 or 1: the product has them side by side at its top.
    bits |= (uint32_t)(word * UINT64_C(0x0102040810204080) >> 56) << i;
  }
  return bits;
}

// ---- Histograms. Tables take turns, because equal numbers in a row would wait for each other.

constexpr int kTables = 4;

template <int BINS>
CPU_INLINE void count(const int32_t* places, int n, int32_t (*tables)[BINS + 1]) {
  int i = 0;
  for (; i + kTables <= n; i += kTables)
    for (int t = 0; t < kTables; t++) tables[t][places[i + t]]++;
  for (; i < n; i++) tables[0][places[i]]++;
}

// ---- Atomics. Sequentially consistent whatever was asked for: never weaker.

template <class T, class F>
CPU_INLINE T atomic_update(T* p, F update) {
  using U = typename Word<sizeof(T)>::type;
  U old = __atomic_load_n((U*)p, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n((U*)p, &old, bits_as<U>((T)update(bits_as<T>(old))), false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST)) {
  }
  return bits_as<T>(old);
}

template <class T>
CPU_INLINE T compare_and_swap(T* p, T expected, T desired) {
  using U = typename Word<sizeof(T)>::type;
  U old = bits_as<U>(expected);
  __atomic_compare_exchange_n((U*)p, &old, bits_as<U>(desired), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return bits_as<T>(old);
}

template <class T>
CPU_INLINE T atomic_load(const T* p) {
  using U = typename Word<sizeof(T)>::type;
  return bits_as<T>(__atomic_load_n((const U*)p, __ATOMIC_SEQ_CST));
}

template <class T>
CPU_INLINE void atomic_store(T* p, T x) {
  using U = typename Word<sizeof(T)>::type;
  __atomic_store_n((U*)p, bits_as<U>(x), __ATOMIC_SEQ_CST);
}

// ---- The loop over the grid.

#ifdef _OPENMP
extern "C" int omp_in_parallel(void);
#endif

// Nanoseconds of work below which waking threads costs more than it saves.
constexpr double kWorthThreads = 50e3;

struct Grid {
  int32_t n[3];
};

// What checking mode reports; see `checks.h`.
struct Failure;

// Memory of a thread for blocks that are too large for its stack.
template <size_t N>
struct Scratch {
  char* bytes = (char*)aligned_alloc(64, N);
  ~Scratch() { free(bytes); }
};

CPU_INLINE double nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

// Runs all programs. `cost` is the nanoseconds of one, as measured by earlier launches; negative if there were none.
template <class Program>
static void run_grid(const int32_t* n, int32_t threads, double* cost, const Program& program) {
  const int64_t total = (int64_t)n[0] * n[1] * n[2];
  const Grid grid{{n[0], n[1], n[2]}};
  const auto run = [&](int64_t i) {
    const int64_t xy = i / n[0];
    program(grid, (int32_t)(i % n[0]), (int32_t)(xy % n[1]), (int32_t)(xy / n[1]));
  };
  const auto note = [&](double known, double took) {
    // What takes longer than before was probably interrupted.
    double next = known < 0 || took < 1.1 * known ? took : 1.1 * known;
    __atomic_store(cost, &next, __ATOMIC_RELAXED);
  };
  double each;
  __atomic_load(cost, &each, __ATOMIC_RELAXED);
  int64_t first = 0;
  double begin = nanoseconds();
#ifdef _OPENMP
  if (threads > 1 && total > 1 && !omp_in_parallel()) {
    if (each < 0) {
      run(first++);
      note(each, nanoseconds() - begin);
      each = nanoseconds() - begin;
      begin = nanoseconds();
    }
    if (each * (double)(total - first) > kWorthThreads) {
      // Programs are timed one by one: a thread that wakes up late must not make them look like more work.
      double sum = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : sum)
      for (int64_t i = first; i < total; i++) {
        const double start = nanoseconds();
        run(i);
        sum += nanoseconds() - start;
      }
      note(each, sum / (double)(total - first));
      return;
    }
  }
#endif
  for (int64_t i = first; i < total; i++) run(i);
  note(each, (nanoseconds() - begin) / (double)(total - first));
}
