/* Decoder layers over the rows of one step, `decoder.py` in one call without the interpreter. A row is one position of one
   request; rows of a request follow each other, in order.

   What a row computes depends on it and the positions before it alone: not on the rows beside it, on how its prompt was
   cut into steps, or on where the blocks of its request lie. Compiled by `compiled.py` for this machine's processor;
   called through `compiled_decoder.py`. */

#include "paged_attention.h"

/* How many floats `run_layers` needs to work with. */
int64_t scratch_floats(const Decoder *d, int64_t rows, int64_t longest) {
    return (int64_t)plan(d, 0, rows, longest).floats;
}

/* Rows of x [count, from_stride] normalised; what lies behind a row is made finite, as products want it. */
static void normalise(
    const Decoder *d, const float *x, size_t x_stride, const float *weight, float *y, size_t y_stride, int64_t count) {
    for (int64_t row = 0; row < count; row++) {
        rms_norm(x + row * x_stride, weight, d->eps * d->hidden, y + row * y_stride, d->hidden);
        for (size_t i = d->hidden; i < y_stride; i++) y[row * y_stride + i] = 0.0f;
    }
}

static __attribute__((noinline)) void add_scaled(const float *x, float scale, float *y, int size) {
    for (int i = 0; i < size; i++) y[i] += scale * x[i];
}

/* down(silu(gate(x)) * up(x)) of `count` rows, at most CHUNK -> or, where `add`, added to, y. */
static void gated(
    const Gated *mlp, const float *x, size_t x_stride, float *inner, size_t inner_stride, float *y, size_t y_stride,
    int count, int add) {
    multiply(&mlp->into, x, x_stride, inner, inner_stride, count, 0);
    for (int row = 0; row < count; row++) gate(inner + row * inner_stride, mlp->into.outputs / 2);
    multiply(&mlp->back, inner, inner_stride, y, y_stride, count, add);
}

/* The `top_k` likeliest experts by their logits, the first of equal ones first, and the weight of each. Overwrites x. */
static __attribute__((noinline)) void choose(const Layer *layer, float *x, int32_t *chosen, float *shares) {
    int size = layer->num_experts, count = 0;
    float sum = soften(x, size, 1.0f), kept_sum = 0.0f;
    for (int i = 0; i < size; i++) {
        float share = x[i] / sum;
        if (!(share >= 0.0f)) share = 0.0f; /* of a row that is not finite: some experts, whichever */
        if (count == layer->top_k && !(share > shares[count - 1])) continue;
        int at = count < layer->top_k ? count++ : count - 1;
        for (; at > 0 && shares[at - 1] < share; at--) shares[at] = shares[at - 1], chosen[at] = chosen[at - 1];
        shares[at] = share, chosen[at] = i;
    }
    for (int rank = 0; rank < count; rank++) kept_sum += shares[rank];
    if (layer->norm_top_k)
        for (int rank = 0; rank < count; rank++) shares[rank] /= kept_sum;
}

/* Adds to each row its experts by their weights, one expert after the other, each for all rows that chose it. */
static void add_experts(const Decoder *d, const Step *s, const Layer *layer, const Plan *p) {
    int32_t *ends = p->order + s->rows * layer->top_k;
    int64_t pairs = s->rows * layer->top_k;
    for (int64_t first = 0; first < s->rows; first += CHUNK) {
        int count = s->rows - first < CHUNK ? (int)(s->rows - first) : CHUNK;
        multiply(&layer->router, p->normed + first * p->hidden, p->hidden, p->logits_at, p->logits, count, 0);
        for (int row = 0; row < count; row++) {
            size_t at = (first + row) * layer->top_k;
            choose(layer, p->logits_at + row * p->logits, p->chosen + at, p->shares + at);
        }
    }
    /* Pairs of a row and an expert, sorted by expert, rows in order. */
    for (int expert = 0; expert <= layer->num_experts; expert++) ends[expert] = 0;
    for (int64_t pair = 0; pair < pairs; pair++) ends[p->chosen[pair] + 1]++;
    for (int expert = 0; expert < layer->num_experts; expert++) ends[expert + 1] += ends[expert];
    for (int64_t pair = 0; pair < pairs; pair++) p->order[ends[p->chosen[pair]]++] = (int32_t)pair;
    for (int64_t first = 0, next; first < pairs; first = next) {
        int32_t expert = p->chosen[p->order[first]];
        next = ends[expert] - first < CHUNK ? ends[expert] : first + CHUNK;
        float *gathered = p->attended_at;
        for (int64_t at = first; at < next; at++)
            memcpy(
                gathered + (at - first) * p->hidden, p->normed + p->order[at] / layer->top_k * p->hidden, 4 * p->hidden);
        gated(
            layer->experts + expert, gathered, p->hidden, p->wide_at, p->wide, p->mixed, p->hidden, (int)(next - first),
            0);
        for (int64_t at = first; at < next; at++) {
            int32_t pair = p->order[at];
            float *x = s->x + pair / layer->top_k * s->stride;
            add_scaled(p->mixed + (at - first) * p->hidden, p->shares[pair], x, d->hidden);
        }
    }
}

static void run_layer(const Decoder *d, const Step *s, const Layer *layer, void *cache, const Plan *p) {
    for (int64_t first = 0; first < s->rows; first += CHUNK) {
        int count = s->rows - first < CHUNK ? (int)(s->rows - first) : CHUNK;
        float *x = s->x + first * s->stride;
        normalise(d, x, s->stride, layer->input_norm, p->mixed, p->hidden, count);
        multiply(&layer->qkv, p->mixed, p->hidden, p->wide_at, p->wide, count, 0);
        for (int row = 0; row < count; row++) enter(d, s, layer->qk_norm, first + row, cache, p->wide_at + row * p->wide);
        attend(d, s, cache, first, count, p->wide_at, p->wide, p);
        multiply(&layer->out, p->attended_at, p->attended, x, s->stride, count, 1);
        normalise(d, x, s->stride, layer->post_norm, p->normed + first * p->hidden, p->hidden, count);
    }
    if (layer->experts) add_experts(d, s, layer, p);
    for (int64_t first = 0; first < s->rows && layer->mlp.into.outputs; first += CHUNK) {
        int count = s->rows - first < CHUNK ? (int)(s->rows - first) : CHUNK;
        const float *normed = p->normed + first * p->hidden;
        float *x = s->x + first * s->stride;
        if (!layer->experts) {
            gated(&layer->mlp, normed, p->hidden, p->wide_at, p->wide, x, s->stride, count, 1);
            continue;
        }
        multiply(&layer->shared_gate, normed, p->hidden, p->logits_at, p->logits, count, 0);
        gated(&layer->mlp, normed, p->hidden, p->wide_at, p->wide, p->mixed, p->hidden, count, 0);
        for (int row = 0; row < count; row++) {
            float share = 1.0f / (1.0f + exponential(-p->logits_at[row * p->logits]));
            add_scaled(p->mixed + row * p->hidden, share, x + row * s->stride, d->hidden);
        }
    }
}

/* Layers `first` to `end` of the decoder, in the memory of x. */
void run_layers(const Decoder *d, const Step *s, int32_t first, int32_t end) {
    Plan p = plan(d, s->scratch, s->rows, s->longest);
    for (int at = first; at < end; at++) run_layer(d, s, d->layers + at, s->caches[at], &p);
}

/* The rows of x normalised, [rows, hidden]. */
void norm_rows(const Decoder *d, const Step *s, const float *weight, float *y) {
    for (int64_t row = 0; row < s->rows; row++)
        rms_norm(s->x + row * s->stride, weight, d->eps * d->hidden, y + row * d->hidden, d->hidden);
}
