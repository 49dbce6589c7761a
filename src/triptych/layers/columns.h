/* Arithmetic on columns, for few channels and many steps of time: x [channels, columns], a register holds neighbouring steps.

   What a column computes does not depend on where in a call it stands or how many there are: whole registers are computed
   always, the last one with what lies behind the columns, and a convolution sums each of its outputs over channels and, for
   each, taps in their order. Therefore every row of a buffer has room for `padded(columns, LANES)` of them, finite or not. */

#ifndef TRIPTYCH_COLUMNS_H
#define TRIPTYCH_COLUMNS_H

#include "rows.h"

/* Channels and registers of a convolution that are summed at a time. */
#define OUTPUTS 6
#if defined(__AVX512F__)
#define VECTORS 4
#else
#define VECTORS 2
#endif

/* `weights`: for whole groups of OUTPUTS channels [inputs, taps, OUTPUTS], then [inputs, taps] for each of the rest. */
typedef struct {
    const float *weights, *bias;
    int32_t outputs, inputs, taps, dilation;
} Convolution;

/* x + sin(x * pi * half_turns)^2 * magnitude, each [channels]. */
typedef struct {
    const float *half_turns, *magnitude;
} Snake;

/* For who lays out weights. */
int32_t convolution_group(void) { return OUTPUTS; }

/* How many earlier columns a convolution sees. */
static int reach_of(const Convolution *c) { return (c->taps - 1) * c->dilation; }

/* `outputs` channels of `vectors` registers. Always inlined, with both known. */
static inline __attribute__((always_inline)) void convolve_tile(
    const Convolution *c, const float *weights, const float *bias, const float *x, size_t x_stride, float *y,
    size_t y_stride, int outputs, int vectors, int add) {
    Floats total[OUTPUTS][VECTORS];
    for (int output = 0; output < outputs; output++)
        for (int at = 0; at < vectors; at++) total[output][at] = bias[output] - (Floats){0};
    for (int input = 0; input < c->inputs; input++, x += x_stride) {
        const float *from = x;
        for (int tap = 0; tap < c->taps; tap++, from += c->dilation, weights += outputs) {
            Floats columns[VECTORS];
            for (int at = 0; at < vectors; at++) columns[at] = load(from + at * LANES);
            for (int output = 0; output < outputs; output++)
                for (int at = 0; at < vectors; at++) total[output][at] += weights[output] * columns[at];
        }
    }
    for (int output = 0; output < outputs; output++)
        for (int at = 0; at < vectors; at++) {
            Floats *to = (Floats *)(y + output * y_stride + at * LANES);
            if (add) *to += total[output][at];
            else *to = total[output][at];
        }
}

/* y [outputs, columns] = or, where `add`, += the convolution of x [inputs, reach + columns]. */
static void convolve(
    const Convolution *c, const float *x, size_t x_stride, float *y, size_t y_stride, int columns, int add) {
    size_t each = (size_t)c->inputs * c->taps;
    int end = (int)padded(columns, LANES);
    for (int at = 0; at < end;) {
        int wide = end - at >= VECTORS * LANES;
        for (int output = 0; output < c->outputs;) {
            const float *weights = c->weights + output * each, *bias = c->bias + output, *from = x + at;
            float *to = y + output * y_stride + at;
            int many = c->outputs - output >= OUTPUTS;
            if (many && wide)
                convolve_tile(c, weights, bias, from, x_stride, to, y_stride, OUTPUTS, VECTORS, add);
            else if (many) convolve_tile(c, weights, bias, from, x_stride, to, y_stride, OUTPUTS, 1, add);
            else if (wide) convolve_tile(c, weights, bias, from, x_stride, to, y_stride, 1, VECTORS, add);
            else convolve_tile(c, weights, bias, from, x_stride, to, y_stride, 1, 1, add);
            output += many ? OUTPUTS : 1;
        }
        at += wide ? VECTORS * LANES : LANES;
    }
}

/* One channel. The square of a sine repeats after half a turn and has no sign: of the argument in half turns there remains
   what it is from a whole number, for whose sine a polynomial is within 1e-8. An argument of more than 2^22 half turns, whose
   sine no float tells, gives something in [0, 1]; one that is infinite, NaN. */
static __attribute__((noinline)) void snake(
    const float *x, float half_turns, float magnitude, float *y, int columns) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    const Floats one = 1.0f - (Floats){0};
    for (int at = 0; at < columns; at += LANES) {
        Floats value = load(x + at), whole = (value * half_turns + shift) - shift, rest = value * half_turns - whole;
        Floats square = rest * rest, sum = square * 0.0776759726f - 0.598308094f;
        sum = sum * square + 2.55008231f;
        sum = sum * square - 5.16771057f;
        Floats sine = (sum * square + 3.14159265f) * rest, wave = sine * sine;
        Words over = (Words)(wave > one);
        wave = (Floats)((over & (Words)one) | (~over & (Words)wave));
        *(Floats *)(y + at) = wave * magnitude + value;
    }
}

#endif
