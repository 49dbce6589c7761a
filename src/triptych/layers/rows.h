/* Arithmetic on rows of floats that the compiled code of this package shares.

   What a row computes does not depend on the rows beside it: everything but products takes one row at a time, in functions
   that are not inlined, and a product sums each of its outputs over the inputs in their order, however many rows it has. */

#ifndef TRIPTYCH_ROWS_H
#define TRIPTYCH_ROWS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16 /* floats in a register */
#define WIDTH 64 /* outputs of a product that are summed at a time */
#elif defined(__AVX__)
#define LANES 8
#define WIDTH 16
#else
#define LANES 4
#define WIDTH 16
#endif
#define PARTS (WIDTH / LANES)
#define TILE 4 /* rows of a product that are summed at a time */

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

/* A weight [outputs, inputs] as blocks of WIDTH outputs, the last one filled up with zeros. A block is words of 32 bits:
   first those of WIDTH outputs with their first inputs, then those with the next ones. A word holds a weight of float32
   (WIDE), two of bfloat16 (NARROW) or four of int8 (SCALED), the first input lowest; inputs are filled up with zeros. Those
   of int8 are to be taken times the scale of their output; there are as many `scales` as outputs in whole blocks. */
enum { WIDE, NARROW, SCALED };

typedef struct {
    const void *blocks;
    const float *scales;
    int32_t outputs, inputs, narrow;
} Product;

/* For who lays out blocks. */
int32_t block_width(void) { return WIDTH; }

static size_t padded(size_t length, size_t to) { return (length + to - 1) / to * to; }

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Holds a value for several uses: gcc would read it again for each, and there are fewer reads in a cycle than uses. */
#if defined(__AVX512F__)
#define IN_REGISTER(floats) __asm__("" : "+v"(floats))
#elif defined(__SSE2__)
#define IN_REGISTER(floats) __asm__("" : "+x"(floats))
#else
#define IN_REGISTER(floats)
#endif

static inline Floats load(const float *x) { return *(const Floats *)x; }

/* The next WIDTH outputs of `rows` rows. Always inlined, with `rows` and `narrow` known. */
static inline __attribute__((always_inline)) void tile(
    const char *block, const float *scales, int inputs, const float *x, size_t x_stride, float *y, size_t y_stride,
    int rows, int narrow, int add) {
    Floats total[TILE][PARTS] = {0};
    const int many = narrow == SCALED ? 4 : narrow == NARROW ? 2 : 1; /* weights in a word */
    const uint32_t *words = (const uint32_t *)block;
    for (int i = 0; i < inputs; i += many, words += WIDTH)
        for (int at = 0; at < many; at++) {
            Floats weights[PARTS];
            for (int part = 0; part < PARTS; part++) {
                Words word = *(const Words *)(words + part * LANES);
                if (narrow == SCALED)
                    weights[part] = __builtin_convertvector((Whole)(word << (24 - 8 * at)) >> 24, Floats);
                else if (narrow == WIDE) weights[part] = (Floats)word;
                else if (at) weights[part] = (Floats)(word & 0xffff0000u);
                else weights[part] = (Floats)(word << 16);
                IN_REGISTER(weights[part]);
            }
            for (int row = 0; row < rows; row++)
                for (int part = 0; part < PARTS; part++)
                    total[row][part] += x[row * x_stride + i + at] * weights[part];
        }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PARTS; part++) {
            Floats *out = (Floats *)(y + row * y_stride + part * LANES);
            if (narrow == SCALED) total[row][part] *= load(scales + part * LANES);
            if (add) *out += total[row][part];
            else *out = total[row][part];
        }
}

/* y [rows, outputs] = or, where `add`, += x [rows, inputs] times the weight. What lies behind `outputs` in a row of y is
   overwritten up to a whole block; what lies behind `inputs` in a row of x must be finite up to whole words. */
static void multiply(
    const Product *p, const float *x, size_t x_stride, float *y, size_t y_stride, int rows, int add) {
    int inputs = p->inputs, many = p->narrow == SCALED ? 4 : p->narrow == NARROW ? 2 : 1;
    size_t block_bytes = padded(inputs, many) / many * WIDTH * 4;
    const char *block = p->blocks;
    for (int output = 0; output < p->outputs; output += WIDTH, block += block_bytes)
        for (int row = 0, some; row < rows; row += some) {
            const float *from = x + row * x_stride;
            const float *scales = p->narrow == SCALED ? p->scales + output : 0;
            float *to = y + row * y_stride + output;
            some = rows - row < TILE ? rows - row : TILE;
#define SUM(some) \
    if (p->narrow == NARROW) tile(block, scales, inputs, from, x_stride, to, y_stride, some, NARROW, add); \
    else if (p->narrow == SCALED) tile(block, scales, inputs, from, x_stride, to, y_stride, some, SCALED, add); \
    else tile(block, scales, inputs, from, x_stride, to, y_stride, some, WIDE, add)
            if (some == 4) SUM(4);
            else if (some == 3) SUM(3);
            else if (some == 2) SUM(2);
            else SUM(1);
#undef SUM
        }
}

/* exp to within two units in the last place, by Cephes' polynomial, of x between -64 and 64, else of the nearer of them:
   beside other terms of a sum e^-64 is nothing, and what is near to it is no denormal number, for which processors take a
   hundred cycles. Without a branch, so that loops over it become vector code. */
static inline float exponential(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, in the low bits */
    x = x < -64.0f ? -64.0f : x;
    x = x > 64.0f ? 64.0f : x;
    float shifted = x * 1.44269504f + shift, whole = shifted - shift, power;
    float rest = x - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23; /* what `shift` has in its low bits is shifted out */
    memcpy(&power, &bits, 4);
    return sum * power;
}

static __attribute__((noinline)) void rms_norm(const float *x, const float *weight, float floor, float *y, int size) {
    float lanes[LANES] = {0}, sum = 0.0f;
    int i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane] * x[i + lane];
    for (; i < size; i++) sum += x[i] * x[i];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    float scale = 1.0f / __builtin_sqrtf(sum + floor);
    for (i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

/* both [2, size] -> silu(first) * second, over the first. */
static __attribute__((noinline)) void gate(float *both, int size) {
    for (int i = 0; i < size; i++) both[i] = both[i] / (1.0f + exponential(-both[i])) * both[size + i];
}

/* Turns a head, x [2 * half], by angles of which `cos` and `sin` [half] are given: halves against each other. */
static inline __attribute__((always_inline)) void rotate(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float left = x[i], right = x[i + half];
        x[i] = left * cos[i] - right * sin[i];
        x[i + half] = right * cos[i] + left * sin[i];
    }
}

static __attribute__((noinline)) float largest(const float *x, int64_t size) {
    float lanes[LANES], peak = x[0];
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = peak;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    for (; i < size; i++) peak = x[i] > peak ? x[i] : peak;
    for (int lane = 0; lane < LANES; lane++) peak = lanes[lane] > peak ? lanes[lane] : peak;
    return peak;
}

#endif
