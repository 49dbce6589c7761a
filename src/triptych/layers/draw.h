/* One draw from a row of logits: the arithmetic of `engine/draw.py`, exact in the same way, so in any order of its sums. */

#ifndef TRIPTYCH_DRAW_H
#define TRIPTYCH_DRAW_H

#include "rows.h"

/* `top_k` as large as the vocabulary or larger keeps all; `least`, a weight below which nothing is drawn, is for min_p. */
typedef struct {
    double top_p, uniform;
    float temperature, least;
    int32_t top_k;
} Drawing;

/* To work in, each as long as the vocabulary: all weights, and those that are kept, with their ids, by id. */
typedef struct {
    float *weights;
    uint64_t *kept;
    int32_t *ids;
} Room;

static int count_from(const float *weights, int size, float cut) {
    Words found[PARTS] = {0};
    int i = 0, count = 0;
    for (; i + WIDTH <= size; i += WIDTH)
        for (int part = 0; part < PARTS; part++) found[part] -= (Words)(load(weights + i + part * LANES) >= cut);
    for (; i < size; i++) count += weights[i] >= cut;
    for (int part = 0; part < PARTS; part++)
        for (int lane = 0; lane < LANES; lane++) count += (int)found[part][lane];
    return count;
}

/* A weight that `depth` of `size` are at or above, more where some are alike. By halving: the bits of floats that are not
   negative are in their order. */
static float top_cut(const float *weights, int size, int depth, float peak) {
    uint32_t low = 0, high;
    float cut = 0.0f;
    memcpy(&high, &peak, 4);
    for (high++; high - low > 1;) {
        uint32_t middle = low + (high - low) / 2;
        float tried;
        memcpy(&tried, &middle, 4);
        int count = count_from(weights, size, tried);
        if (count < depth) {
            high = middle;
            continue;
        }
        low = middle;
        cut = tried;
        if (count == depth) break;
    }
    return cut;
}

static uint64_t sum_from(const uint64_t *weights, int size, uint64_t cut) {
    uint64_t sum = 0;
    for (int i = 0; i < size; i++) sum += weights[i] >= cut ? weights[i] : 0;
    return sum;
}

/* The smallest weight whose betters together weigh less than `mass`, where top_p cuts. By halving. */
static uint64_t nucleus_cut(const uint64_t *weights, int size, uint64_t peak, double mass) {
    uint64_t low = 0, high = peak; /* the cut is above the one, and at most the other */
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if ((double)sum_from(weights, size, middle + 1) < mass) high = middle;
        else low = middle;
    }
    return high;
}

/* One id of `size`. Where nothing is kept, as of logits that are not finite, the last one. */
static __attribute__((noinline)) int draw(const float *x, int size, const Drawing *d, Room room) {
    const float unit = 17179869184.0f; /* 2^34, of the likeliest */
    float peak = largest(x, size), cut = 1.0f;
    for (int i = 0; i < size; i++)
        room.weights[i] = __builtin_floorf(exponential((x[i] - peak) / d->temperature) * unit);
    if (d->top_k < size) {
        float of_top = top_cut(room.weights, size, d->top_k, unit);
        cut = of_top > cut ? of_top : cut; /* what has no weight is never drawn */
    }
    int count = 0;
    for (int i = 0; i < size; i++) {
        if (!(room.weights[i] >= cut)) continue;
        room.ids[count] = i;
        room.kept[count++] = (uint64_t)room.weights[i];
    }
    uint64_t end = (uint64_t)__builtin_ceilf(d->least), below = 0;
    if (d->top_p < 1.0) {
        double mass = (double)sum_from(room.kept, count, 0) * d->top_p;
        uint64_t of_nucleus = nucleus_cut(room.kept, count, (uint64_t)unit, mass);
        end = of_nucleus > end ? of_nucleus : end;
    }
    /* Of the total less one unit: then a uniform rounded up to 1 still finds the last token that has weight. */
    double target = ((double)sum_from(room.kept, count, end) - 1.0) * d->uniform;
    for (int i = 0; i < count; i++) {
        if (room.kept[i] >= end) below += room.kept[i];
        if ((double)below > target) return room.ids[i];
    }
    return size - 1;
}

static int first_largest(const float *x, int size) {
    float peak = largest(x, size);
    for (int i = 0; i < size; i++)
        if (x[i] == peak) return i;
    return 0;
}

#endif
