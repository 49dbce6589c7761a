/* Attention of a step's rows over the paged KV cache: keys and values are entered, then each row looks at those of its
   request up to itself. Included by `decoder.c`. */

#include "decoder.h"

static inline size_t block_values(const Decoder *d) { return (size_t)d->block_size * 2 * d->kv_heads * d->head_dim; }

static inline uint16_t narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0; /* to nearest, ties to even */
}

static inline void keep(void *cache, int narrow, size_t at, float x) {
    if (narrow) ((uint16_t *)cache)[at] = narrowed(x);
    else ((float *)cache)[at] = x;
}

typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline __attribute__((always_inline)) Floats kept(const void *cache, int narrow, size_t at) {
    if (!narrow) return load((const float *)cache + at);
    return (Floats)(__builtin_convertvector(*(const Halves *)((const uint16_t *)cache + at), Words) << 16);
}

static float kept_one(const void *cache, int narrow, size_t at) {
    if (!narrow) return ((const float *)cache)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)cache)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Normalises and turns the query and key heads of a row, qkv [heads + 2 kv_heads, head_dim], and writes its key and value
   to the cache. */
static __attribute__((noinline)) void enter(
    const Decoder *d, const Step *s, const float *qk_norm, int64_t row, void *cache, float *qkv) {
    int dim = d->head_dim, half = dim / 2;
    const float *cos = s->cos + row * dim, *sin = s->signed_sin + row * dim + half;
    for (int head = 0; head < d->heads + d->kv_heads; head++) {
        float *x = qkv + (size_t)head * dim;
        rms_norm(x, qk_norm + (size_t)head * dim, d->eps * dim, x, dim);
        rotate(x, cos, sin, half);
    }
    size_t size = d->block_size, at = s->lengths[row] - 1, within = at % size;
    size_t base = (size_t)s->blocks[s->starts[row] + at / size] * block_values(d);
    const float *key = qkv + (size_t)d->heads * dim, *value = key + (size_t)d->kv_heads * dim;
    for (int head = 0; head < d->kv_heads; head++)
        for (int i = 0; i < dim; i++) {
            keep(cache, d->narrow_cache, base + ((size_t)head * dim + i) * size + within, key[head * dim + i]);
            keep(cache, d->narrow_cache, base + ((d->kv_heads + head) * size + within) * dim + i, value[head * dim + i]);
        }
}

/* Some query heads that look at the same key head, of one row or of some of a request. */
typedef struct {
    const float *queries[TILE];
    float *scores[TILE], *outs[TILE];
    int64_t lengths[TILE];
    int count;
} Seekers;

/* One key head of a layer, for one request. */
typedef struct {
    const void *cache;
    const int64_t *blocks;
    size_t block_values, keys, values, size; /* values of a block; where this head's begin in it; positions of a block */
    int dim, narrow;
} Sought;

/* Scores of the positions before `length`, and of some more that are not to be looked at. */
static inline __attribute__((always_inline)) void score(
    const Sought *sought, const Seekers *seekers, int first, int count, int64_t length, int narrow) {
    const size_t size = sought->size;
    /* A piece is LANES positions of a block, or what is left of it: PARTS of them are summed at a time. What a piece has
       too many is overwritten by the next one. */
    for (size_t block = 0, in_block = 0; block * size + in_block < (size_t)length;) {
        size_t at[PARTS], position[PARTS];
        int parts = 0;
        for (; parts < PARTS && block * size + in_block < (size_t)length; parts++) {
            at[parts] = (size_t)sought->blocks[block] * sought->block_values + sought->keys + in_block;
            position[parts] = block * size + in_block;
            in_block += LANES;
            if (in_block >= size) block++, in_block = 0;
        }
        for (int part = parts; part < PARTS; part++) at[part] = at[0];
        Floats total[TILE][PARTS] = {0};
        for (int i = 0; i < sought->dim; i++)
            for (int part = 0; part < PARTS; part++) {
                Floats key = kept(sought->cache, narrow, at[part] + i * size);
                for (int one = 0; one < count; one++) total[one][part] += seekers->queries[first + one][i] * key;
            }
        for (int part = 0; part < parts; part++)
            for (int one = 0; one < count; one++)
                memcpy(seekers->scores[first + one] + position[part], &total[one][part], sizeof(Floats));
    }
}

/* Adds the values of positions `from` to `to` by their scores, in order. */
static inline __attribute__((always_inline)) void mix(
    const Sought *sought, const Seekers *seekers, int first, int count, int64_t from, int64_t to, int narrow) {
    const int dim = sought->dim;
    const size_t size = sought->size;
    int at = 0;
    for (int parts = PARTS; at + LANES <= dim; at += parts * LANES) {
        if (at + parts * LANES > dim) parts = 1;
        Floats total[TILE][PARTS] = {0};
        for (int one = 0; one < count; one++)
            for (int part = 0; part < parts; part++)
                total[one][part] = load(seekers->outs[first + one] + at + part * LANES);
        for (int64_t position = from; position < to;) {
            size_t block = position / size, within = position % size;
            size_t value = (size_t)sought->blocks[block] * sought->block_values + sought->values + within * dim + at;
            for (; within < size && position < to; within++, position++, value += dim)
                if (parts == PARTS)
                    for (int part = 0; part < PARTS; part++) {
                        Floats lanes = kept(sought->cache, narrow, value + part * LANES);
                        for (int one = 0; one < count; one++)
                            total[one][part] += seekers->scores[first + one][position] * lanes;
                    }
                else {
                    Floats lanes = kept(sought->cache, narrow, value);
                    for (int one = 0; one < count; one++)
                        total[one][0] += seekers->scores[first + one][position] * lanes;
                }
        }
        for (int one = 0; one < count; one++)
            for (int part = 0; part < parts; part++)
                memcpy(seekers->outs[first + one] + at + part * LANES, &total[one][part], sizeof(Floats));
    }
    for (; at < dim; at++)
        for (int64_t position = from; position < to; position++) {
            size_t value = (size_t)sought->blocks[position / size] * sought->block_values + sought->values;
            float one_value = kept_one(sought->cache, narrow, value + position % size * dim + at);
            for (int one = 0; one < count; one++)
                seekers->outs[first + one][at] += seekers->scores[first + one][position] * one_value;
        }
}

#define OF_SOME(what, ...) \
    if (sought->narrow) what(sought, seekers, __VA_ARGS__, 1); \
    else what(sought, seekers, __VA_ARGS__, 0)

static __attribute__((noinline)) void score_all(const Sought *sought, const Seekers *seekers, int64_t length) {
    if (seekers->count == 4) OF_SOME(score, 0, 4, length);
    else if (seekers->count == 3) OF_SOME(score, 0, 3, length);
    else if (seekers->count == 2) OF_SOME(score, 0, 2, length);
    else OF_SOME(score, 0, 1, length);
}

static __attribute__((noinline)) void mix_all(const Sought *sought, const Seekers *seekers, int64_t to) {
    if (seekers->count == 4) OF_SOME(mix, 0, 4, 0, to);
    else if (seekers->count == 3) OF_SOME(mix, 0, 3, 0, to);
    else if (seekers->count == 2) OF_SOME(mix, 0, 2, 0, to);
    else OF_SOME(mix, 0, 1, 0, to);
}

static __attribute__((noinline)) void mix_rest(const Sought *sought, const Seekers *seekers, int one, int64_t from) {
    OF_SOME(mix, one, 1, from, seekers->lengths[one]);
}

/* x -> exp(scale (x - its largest)), and the sum of them. Behind `size`, up to whole LANES, x is overwritten. */
static __attribute__((noinline)) float soften(float *x, int64_t size, float scale) {
    float peak = largest(x, size), lanes[LANES] = {0}, sum = 0.0f;
    int64_t whole = (int64_t)padded(size, LANES), i = 0;
    for (i = 0; i < whole; i++) x[i] = exponential((x[i] - peak) * scale);
    for (i = 0; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane];
    for (; i < size; i++) sum += x[i];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* Scores, weights of them, and the values by these, for all of them. */
static void seek(const Sought *sought, Seekers *seekers) {
    float scale = 1.0f / __builtin_sqrtf((float)sought->dim), sums[TILE];
    int64_t least = seekers->lengths[0], most = seekers->lengths[seekers->count - 1]; /* rows are in order */
    score_all(sought, seekers, most);
    for (int one = 0; one < seekers->count; one++) {
        sums[one] = soften(seekers->scores[one], seekers->lengths[one], scale);
        memset(seekers->outs[one], 0, 4 * (size_t)sought->dim);
    }
    mix_all(sought, seekers, least);
    for (int one = 0; one < seekers->count; one++) {
        if (seekers->lengths[one] > least) mix_rest(sought, seekers, one, least);
        for (int i = 0; i < sought->dim; i++) seekers->outs[one][i] /= sums[one];
    }
    seekers->count = 0;
}

/* Attention of `count` rows from `first` on, whose keys and values are in the cache: qkv [count, stride] -> out. */
static void attend(
    const Decoder *d, const Step *s, const void *cache, int64_t first, int64_t count, const float *qkv, size_t stride,
    const Plan *p) {
    int group = d->heads / d->kv_heads;
    size_t dim = d->head_dim, places = padded(s->longest + 2 * LANES, LANES);
    for (int64_t row = 0, next; row < count; row = next) {
        for (next = row + 1; next < count && s->starts[first + next] == s->starts[first + row];) next++;
        for (int key_head = 0; key_head < d->kv_heads; key_head++) {
            Sought sought = {
                .cache = cache,
                .blocks = s->blocks + s->starts[first + row],
                .block_values = block_values(d),
                .keys = (size_t)key_head * dim * d->block_size,
                .values = (size_t)(d->kv_heads + key_head) * dim * d->block_size,
                .size = d->block_size,
                .dim = d->head_dim,
                .narrow = d->narrow_cache,
            };
            Seekers seekers = {.count = 0};
            for (int64_t of = row; of < next; of++)
                for (int head = key_head * group; head < (key_head + 1) * group; head++) {
                    int at = seekers.count++;
                    seekers.queries[at] = qkv + of * stride + head * dim;
                    seekers.outs[at] = p->attended_at + of * p->attended + head * dim;
                    seekers.scores[at] = p->scores + at * places;
                    seekers.lengths[at] = s->lengths[first + of];
                    if (seekers.count == TILE) seek(&sought, &seekers);
                }
            if (seekers.count) seek(&sought, &seekers);
        }
    }
    for (int64_t row = 0; row < count; row++) /* finite, as products want it */
        for (size_t i = d->heads * dim; i < p->attended; i++) p->attended_at[row * p->attended + i] = 0.0f;
}
