// A step of one token through the blocks of model.py on a CPU, and the product of few rows with a weight. Block
// stands here a second time, for speed; tests/speed/test_cpu.py holds the two equal. Weights and cache are read where
// they lie, in float or bfloat16, and all arithmetic is in float. Letters as in model.py, and f for FFN channels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bfloat16 { std::uint16_t bits; };

inline float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float value(float x) { return x; }
inline float value(bfloat16 x) { return from_bits(std::uint32_t(x.bits) << 16); }
inline void put(float& to, float x) { to = x; }
inline void put(bfloat16& to, float x) {  // to the nearest, ties to even
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float exponential(float x) {  // within 2e-7 of its value; without branches, so that loops become vectors
  x = x < -87 ? -87 : x > 88 ? 88 : x;
  float n = (x * 1.44269504f + 12582912.f) - 12582912.f;
  float y = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  y = 1 + y * (1 + y * (0.5f + y * (1 / 6.f + y * (1 / 24.f + y * (1 / 120.f + y / 720)))));
  return y * from_bits((std::int32_t(n) + 127) << 23);
}

constexpr long LANES = 64;  // so many sums at once hide the latency of an addition

template <class T>
inline void ahead(const T* w) {  // asks for what is read soon; a processor does so by itself, but less far
  constexpr long distance = 2048 / sizeof(T), line = 64 / sizeof(T);
  for (long i = 0; i < LANES; i += line) __builtin_prefetch(w + distance + i);
}

inline float dot(const float* w, const float* x, long n) {
  float sums[LANES] = {}, sum = 0;
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    ahead(w + i);
    for (long lane = 0; lane < LANES; lane++) sums[lane] += w[i + lane] * x[i + lane];
  }
#pragma omp simd reduction(+ : sum)
  for (long rest = i; rest < n; rest++) sum += w[rest] * x[rest];
#pragma omp simd reduction(+ : sum)
  for (long lane = 0; lane < LANES; lane++) sum += sums[lane];
  return sum;
}

// Two bfloat16 are the halves of one word, and each becomes a float by one operation on the word. So the numbers
// that they are multiplied with come in the order of `arranged`: of every 64, first the even ones, then the odd ones.
inline float dot(const bfloat16* w, const float* x, long n) {
  constexpr long half = LANES / 2;
  float low[half] = {}, high[half] = {}, sum = 0;
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    ahead(w + i);
    for (long lane = 0; lane < half; lane++) {
      std::uint32_t pair;
      std::memcpy(&pair, w + i + 2 * lane, 4);
      low[lane] += from_bits(pair << 16) * x[i + lane];
      high[lane] += from_bits(pair & 0xffff0000) * x[i + half + lane];
    }
  }
#pragma omp simd reduction(+ : sum)
  for (long rest = i; rest < n; rest++) sum += value(w[rest]) * x[rest];
#pragma omp simd reduction(+ : sum)
  for (long lane = 0; lane < half; lane++) sum += low[lane] + high[lane];
  return sum;
}

template <class T>
const float* arranged(const float* x, long b, long n, float* room) {  // rows x[b, n] as `dot` with T wants them
  if (sizeof(T) == 4) return x;
  for (long row = 0; row < b; row++, x += n, room += n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES)
      for (long lane = 0; lane < LANES / 2; lane++) {
        room[i + lane] = x[i + 2 * lane];
        room[i + LANES / 2 + lane] = x[i + 2 * lane + 1];
      }
    for (; i < n; i++) room[i] = x[i];
  }
  return room - b * n;
}

constexpr long TILE = 16;  // rows of a weight at once, one after the other: memory is read in order

// y[row, n] = x[row] . w[n] for all rows and the tile of n that begins at `first`
template <class T>
inline void tile(const float* x, const T* w, float* y, long b, long m, long o, long first) {
  for (long n = first; n < std::min(first + TILE, o); n++)
    for (long row = 0; row < b; row++) y[row * o + n] = dot(w + n * m, x + row * m, m);
}

// Within a parallel region: the tiles shared out over its threads, which do not wait for each other at the end.
template <class T>
void products(const float* x, const T* w, float* y, long b, long m, long o) {  // x as `arranged`
#pragma omp for schedule(static) nowait
  for (long first = 0; first < o; first += TILE) tile(x, w, y, b, m, o, first);
}

template <class T>
void norm(const float* x, const T* weight, float eps, float* y, long n) {
  float factor = 1 / std::sqrt(dot(x, x, n) / n + eps);
#pragma omp simd
  for (long i = 0; i < n; i++) y[i] = x[i] * factor * value(weight[i]);
}

template <class T>
void rotate(float* x, const T* cos, const T* sin, long half) {
#pragma omp simd
  for (long i = 0; i < half; i++) {
    float a = x[i], b = x[i + half], c = value(cos[i]), s = value(sin[i]);
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

inline void swiglu(float* gate, const float* up, long n) {
#pragma omp simd
  for (long i = 0; i < n; i++) gate[i] *= up[i] / (1 + exponential(-gate[i]));
}

template <long W>  // scores[n] += k[n, W] . q[W]
inline void compare(const float* q, const float* k, float* scores, long n, long d) {
  for (long s = 0; s < n; s++) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < W; i++) sum += k[s * d + i] * q[i];
    scores[s] += sum;
  }
}

template <long W>  // y[W] += shares[n] . v[n, W]
inline void mix(const float* shares, const float* v, float* y, long n, long d) {
  float sum[W];
  for (long i = 0; i < W; i++) sum[i] = y[i];
  for (long s = 0; s < n; s++)
#pragma omp simd
    for (long i = 0; i < W; i++) sum[i] += shares[s] * v[s * d + i];
  for (long i = 0; i < W; i++) y[i] = sum[i];
}

inline const float* floats(const float* x, long, float*) { return x; }
inline const float* floats(const bfloat16* x, long n, float* room) {
#pragma omp simd
  for (long i = 0; i < n; i++) room[i] = value(x[i]);
  return room;
}

constexpr long KEYS = 128;  // positions at once: their keys and values stay in the nearest cache

// Softmax-weighted values of positions [from, to) for r queries q[r, d]; y[r, d + 2] is the sum, unnormalised,
// and behind it the highest score and the sum of shares (online softmax, arXiv:1805.02867).
template <class T>
void attend(const float* q, const T* k, const T* v, const bool* seen, float scale, float* y, long r, long d,
            long from, long to) {
  std::vector<float> room(sizeof(T) == 4 ? 0 : 2 * KEYS * d);
  for (long j = 0; j < r; j++) {
    float* sum = y + j * (d + 2);
    std::fill(sum, sum + d + 2, 0.f);
    sum[d] = -INFINITY;
  }
  for (; from < to; from += KEYS) {
    long n = std::min(KEYS, to - from);
    const float* ks = floats(k + from * d, n * d, room.data());
    const float* vs = floats(v + from * d, n * d, room.data() + n * d);
    for (long j = 0; j < r; j++) {
      float shares[KEYS] = {}, *sum = y + j * (d + 2), highest = sum[d], total = 0;
      long i = 0;
      for (; i + 64 <= d; i += 64) compare<64>(q + j * d + i, ks + i, shares, n, d);
      for (; i + 16 <= d; i += 16) compare<16>(q + j * d + i, ks + i, shares, n, d);
      for (; i < d; i++) compare<1>(q + j * d + i, ks + i, shares, n, d);
      for (long s = 0; s < n; s++) {
        shares[s] *= scale;
        if (seen && !seen[from + s]) shares[s] = -INFINITY;
        highest = shares[s] > highest ? shares[s] : highest;
      }
#pragma omp simd reduction(+ : total)
      for (long s = 0; s < n; s++) {
        shares[s] = shares[s] == -INFINITY ? 0 : exponential(shares[s] - highest);
        total += shares[s];
      }
      float kept = sum[d] == -INFINITY ? 0 : exponential(sum[d] - highest);
      for (long i = 0; i < d; i++) sum[i] *= kept;
      sum[d] = highest, sum[d + 1] = sum[d + 1] * kept + total;
      for (i = 0; i + 64 <= d; i += 64) mix<64>(shares, vs + i, sum + i, n, d);
      for (; i + 16 <= d; i += 16) mix<16>(shares, vs + i, sum + i, n, d);
      for (; i < d; i++) mix<1>(shares, vs + i, sum + i, n, d);
    }
  }
}

struct Block {  // of each block: addresses and scalars, as cpu.py fills them in
  void *pre_attention_norm, *q_proj, *k_proj, *v_proj, *o_proj, *q_norm, *k_norm;
  void *pre_ffn_norm, *gate_proj, *up_proj, *down_proj;
  double eps[4], scale;  // eps in the order of the norms above
};

struct Step {
  void *x, *cos, *sin, *seen;  // the stream (b, 1, m), which is replaced; angles; the mask, or null
  long b, h, g, d, m, f, capacity, length;  // length: positions held, the new one among them
  long angles, mask;                        // from one row's to the next, in numbers; 0 where all share one
  long blocks, threads;
};

template <class T>
void step(const Step& a, const Block* blocks, void* const* keys, void* const* values) {
  auto in = [](void* address) { return static_cast<const T*>(address); };
  const long b = a.b, h = a.h, g = a.g, d = a.d, m = a.m, f = a.f, r = h / g;
  const long splits = std::max(1L, std::min(a.length / (2 * KEYS), 2 * a.threads));
  const long part = (a.length + splits - 1) / splits;
  std::vector<float> q(b * h * d), k(b * g * d), v(b * g * d), heads(b * h * d), delta(b * m);
  std::vector<float> gate(b * f), up(b * f), parts(b * h * splits * (d + 2));
#pragma omp parallel num_threads(a.threads)
  {
    // Of each thread its own: cheaper than to wait for one.
    std::vector<float> x(b * m), normed(b * m), room(b * std::max({m, h * d, f}));
    for (long i = 0; i < b * m; i++) x[i] = value(in(a.x)[i]);
    for (long n = 0; n < a.blocks; n++) {
      const Block& block = blocks[n];
      for (long row = 0; row < b; row++)
        norm(&x[row * m], in(block.pre_attention_norm), block.eps[0], &normed[row * m], m);
      const float* read = arranged<T>(normed.data(), b, m, room.data());
      products(read, in(block.q_proj), q.data(), b, m, h * d);
      products(read, in(block.k_proj), k.data(), b, m, g * d);
      products(read, in(block.v_proj), v.data(), b, m, g * d);
#pragma omp barrier
#pragma omp for schedule(static)
      for (long i = 0; i < b * (h + g); i++) {
        long row = i / (h + g), head = i % (h + g), group = row * g + head - h;
        bool query = head < h;
        float* own = query ? &q[(row * h + head) * d] : &k[group * d];
        if (void* weight = query ? block.q_norm : block.k_norm) norm(own, in(weight), block.eps[query ? 1 : 2], own, d);
        rotate(own, in(a.cos) + row * a.angles, in(a.sin) + row * a.angles, d / 2);
        if (query) continue;
        long slot = (group * a.capacity + a.length - 1) * d;
        for (long j = 0; j < d; j++) {
          put(static_cast<T*>(keys[n])[slot + j], own[j]);
          put(static_cast<T*>(values[n])[slot + j], v[group * d + j]);
        }
      }
#pragma omp for schedule(dynamic)
      for (long i = 0; i < b * g * splits; i++) {
        long group = i / splits, from = i % splits * part, first = group * a.capacity * d;
        const bool* seen = a.seen ? static_cast<bool*>(a.seen) + group / g * a.mask : nullptr;
        attend(&q[group * r * d], in(keys[n]) + first, in(values[n]) + first, seen, block.scale,
               &parts[i * r * (d + 2)], r, d, from, std::min(from + part, a.length));
      }
#pragma omp for schedule(static)
      for (long i = 0; i < b * h; i++) {
        auto of = [&](long split) { return &parts[((i / r * splits + split) * r + i % r) * (d + 2)]; };
        float highest = -INFINITY, total = 0, *head = &heads[i * d];
        for (long s = 0; s < splits; s++) highest = std::max(highest, of(s)[d]);
        std::fill(head, head + d, 0.f);
        for (long s = 0; s < splits; s++) {
          float kept = exponential(of(s)[d] - highest);
          total += kept * of(s)[d + 1];
          for (long j = 0; j < d; j++) head[j] += kept * of(s)[j];
        }
        for (long j = 0; j < d; j++) head[j] /= total;
      }
      read = arranged<T>(heads.data(), b, h * d, room.data());
      products(read, in(block.o_proj), delta.data(), b, h * d, m);
#pragma omp barrier
      for (long i = 0; i < b * m; i++) x[i] += delta[i];
      for (long row = 0; row < b; row++)
        norm(&x[row * m], in(block.pre_ffn_norm), block.eps[3], &normed[row * m], m);
      read = arranged<T>(normed.data(), b, m, room.data());
      products(read, in(block.gate_proj), gate.data(), b, m, f);
      products(read, in(block.up_proj), up.data(), b, m, f);
#pragma omp for schedule(static)
      for (long first = 0; first < f; first += TILE)  // shared out as above: each thread reads what it has written
        for (long row = 0; row < b; row++) swiglu(&gate[row * f + first], &up[row * f + first], std::min(TILE, f - first));
      read = arranged<T>(gate.data(), b, f, room.data());
      products(read, in(block.down_proj), delta.data(), b, f, m);
#pragma omp barrier
      for (long i = 0; i < b * m; i++) x[i] += delta[i];
    }
#pragma omp single
    for (long i = 0; i < b * m; i++) put(static_cast<T*>(a.x)[i], x[i]);
  }
}

template <class T>
void linear(const T* x, const T* w, T* y, long b, long m, long o, long threads) {
  std::vector<float> xs(b * m), room(b * m), ys(b * o);
  for (long i = 0; i < b * m; i++) xs[i] = value(x[i]);
  const float* read = arranged<T>(xs.data(), b, m, room.data());
#pragma omp parallel num_threads(threads)
  {
    products(read, w, ys.data(), b, m, o);
#pragma omp barrier
#pragma omp for schedule(static)
    for (long i = 0; i < b * o; i++) put(y[i], ys[i]);
  }
}

}  // namespace

extern "C" {
void step_float32(const Step* a, const Block* blocks, void* const* keys, void* const* values) {
  step<float>(*a, blocks, keys, values);
}
void step_bfloat16(const Step* a, const Block* blocks, void* const* keys, void* const* values) {
  step<bfloat16>(*a, blocks, keys, values);
}
void linear_float32(const float* x, const float* w, float* y, long b, long m, long o, long threads) {
  linear(x, w, y, b, m, o, threads);
}
void linear_bfloat16(const void* x, const void* w, void* y, long b, long m, long o, long threads) {
  using T = bfloat16;
  linear(static_cast<const T*>(x), static_cast<const T*>(w), static_cast<T*>(y), b, m, o, threads);
}
}
