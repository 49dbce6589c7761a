/* What `decoder.c` works on: layers, the rows of a step, and the memory that they need. `compiled_decoder.py` mirrors the
   structs. */

#ifndef DECODER_H
#define DECODER_H

#include "rows.h"

#define CHUNK 64 /* rows that go through products together, so that they stay in the cache beside a block of weights */

typedef struct {
    Product into, back;
} Gated;

/* Norm weights are times the root of their number. `qk_norm` [heads + kv_heads, head_dim]. Where there are `experts`,
   `mlp` is the shared one, of no outputs if there is none. */
typedef struct {
    Product qkv, out, router, shared_gate;
    Gated mlp;
    const Gated *experts;
    const float *input_norm, *qk_norm, *post_norm;
    int32_t num_experts, top_k, norm_top_k;
} Layer;

typedef struct {
    const Layer *layers;
    float eps;
    int32_t num_layers, hidden, heads, kv_heads, head_dim, block_size, narrow_cache;
} Decoder;

/* Row r is the last of `lengths[r]` positions of its request, whose cache blocks are `blocks[starts[r]]` and on. `cos` and
   `signed_sin` [rows, head_dim] as of `rotary.py`. x [rows, stride].

   A block of a layer's cache has, for each key head, the keys as [head_dim, block_size], then for each its values as
   [block_size, head_dim]. */
typedef struct {
    void *const *caches;
    const int64_t *blocks, *starts, *lengths;
    const float *cos, *signed_sin;
    float *x, *scratch;
    int64_t rows, stride, longest;
} Step;

/* Where things lie in the scratch memory, and how long a row of them is. */
typedef struct {
    size_t hidden, attended, wide, logits;
    float *normed, *attended_at, *wide_at, *mixed, *logits_at, *scores, *shares;
    int32_t *chosen, *order;
    size_t floats;
} Plan;

static Plan plan(const Decoder *d, float *scratch, size_t rows, size_t longest) {
    size_t dim = d->head_dim, wide = padded((d->heads + 2 * (size_t)d->kv_heads) * dim, WIDTH), experts = 0, top_k = 0;
    for (int at = 0; at < d->num_layers; at++) {
        const Layer *layer = d->layers + at;
        wide = larger(wide, padded(layer->mlp.into.outputs, WIDTH));
        if (layer->experts) wide = larger(wide, padded(layer->experts->into.outputs, WIDTH));
        experts = larger(experts, layer->num_experts);
        top_k = larger(top_k, layer->top_k);
    }
    Plan p = {
        .hidden = padded(d->hidden, WIDTH),
        .attended = padded(d->heads * dim, WIDTH),
        .wide = wide,
        .logits = padded(larger(experts, 1), WIDTH),
    };
    size_t chunk = rows < CHUNK ? rows : CHUNK, at = 0;
#define PLACE(member, count) p.member = (void *)((uintptr_t)scratch + 4 * at), at += padded(count, LANES)
    PLACE(normed, rows * p.hidden);
    PLACE(attended_at, chunk * larger(p.attended, p.hidden));
    PLACE(wide_at, chunk * p.wide);
    PLACE(mixed, chunk * p.hidden);
    PLACE(logits_at, chunk * p.logits);
    PLACE(scores, TILE * padded(longest + 2 * LANES, LANES));
    PLACE(shares, rows * top_k);
    PLACE(chosen, rows * top_k);
    PLACE(order, rows * top_k + experts + 1);
#undef PLACE
    p.floats = at;
    return p;
}

#endif
