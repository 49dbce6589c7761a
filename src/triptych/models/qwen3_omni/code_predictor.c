/* The residual codes of some codec frames, as `code_predictor.py` draws them, in one call without the interpreter.

   A row's codes do not depend on the rows beside it, see `rows.h`. Compiled by `layers/compiled.py` for this machine's
   processor; called through `compiled_frame.py`, which mirrors the structs. */

#include "draw.h"

/* Norm weights are times the root of their number. `qk_norm` [heads + kv_heads, head_dim]. */
typedef struct {
    Product qkv, out, gate_up, down;
    const float *input_norm, *qk_norm, *post_norm;
} Layer;

/* `tables` [residuals, vocab, hidden] in float32 or bfloat16. `cos` and `sin` [residuals + 1, head_dim / 2]. */
typedef struct {
    const Layer *layers;
    const Product *draws;
    const float *norm, *cos, *sin;
    const void *tables;
    double top_p;
    float eps;
    int32_t num_layers, residuals, hidden, heads, kv_heads, head_dim, intermediate, vocab, narrow_tables, top_k;
} Predictor;

/* Of each row: its length in the buffers that hold it. */
typedef struct {
    size_t hidden, attended, wide, vocab, positions, cache;
} Strides;

static Strides strides(const Predictor *p) {
    size_t queries = (size_t)p->heads * p->head_dim, keys = (size_t)p->kv_heads * p->head_dim;
    size_t qkv = queries + 2 * keys, gate_up = 2 * (size_t)p->intermediate;
    size_t positions = padded((size_t)p->residuals + 1, LANES);
    return (Strides){
        .hidden = padded(p->hidden, WIDTH),
        .attended = padded(queries, WIDTH),
        .wide = padded(qkv > gate_up ? qkv : gate_up, WIDTH),
        .vocab = padded(p->vocab, WIDTH),
        .positions = positions,
        .cache = 2 * keys * positions,
    };
}

/* How many floats `draw_frames` needs to work with. */
int64_t scratch_floats(const Predictor *p, int32_t rows) {
    Strides s = strides(p);
    size_t row = 2 * (2 * s.hidden + s.attended + s.wide) + s.vocab + p->num_layers * s.cache;
    return (int64_t)(row * (size_t)rows);
}

/* One position of one stream in one layer: qkv [heads + 2 kv_heads, head_dim] -> out [heads, head_dim]. `cache` has, for
   each key head, the keys as [head_dim, positions], then the values as [positions, head_dim]. */
static __attribute__((noinline)) void attend(
    const Predictor *p, const float *qk_norm, float *qkv, int position, float *cache, size_t positions, float *out) {
    int dim = p->head_dim, half = dim / 2, group = p->heads / p->kv_heads;
    const float *cos = p->cos + (size_t)position * half, *sin = p->sin + (size_t)position * half;
    for (int head = 0; head < p->heads + p->kv_heads; head++) {
        float *x = qkv + (size_t)head * dim;
        rms_norm(x, qk_norm + (size_t)head * dim, p->eps * dim, x, dim);
        rotate(x, cos, sin, half);
    }
    float scale = 1.0f / __builtin_sqrtf((float)dim), scores[positions];
    for (int key_head = 0; key_head < p->kv_heads; key_head++) {
        float *keys = cache + 2 * (size_t)key_head * dim * positions, *values = keys + dim * positions;
        const float *key = qkv + (size_t)(p->heads + key_head) * dim, *value = key + (size_t)p->kv_heads * dim;
        for (int i = 0; i < dim; i++) keys[i * positions + position] = key[i];
        memcpy(values + (size_t)position * dim, value, 4 * (size_t)dim);
        for (int head = key_head * group; head < (key_head + 1) * group; head++) {
            const float *query = qkv + (size_t)head * dim;
            float *mixed = out + (size_t)head * dim, peak, sum = 0.0f;
            /* Of positions to come as well: those scores are not looked at. */
            for (size_t at = 0; at < positions; at += LANES) {
                Floats total = {0};
                for (int i = 0; i < dim; i++) total += query[i] * load(keys + i * positions + at);
                memcpy(scores + at, &total, sizeof total);
            }
            peak = scores[0];
            for (int at = 1; at <= position; at++) peak = scores[at] > peak ? scores[at] : peak;
            for (size_t at = 0; at < positions; at++) scores[at] = exponential((scores[at] - peak) * scale);
            for (int at = 0; at <= position; at++) sum += scores[at];
            for (int i = 0; i < dim; i++) mixed[i] = 0.0f;
            for (int at = 0; at <= position; at++)
                for (int i = 0; i < dim; i++) mixed[i] += scores[at] * values[at * dim + i];
            for (int i = 0; i < dim; i++) mixed[i] /= sum;
        }
    }
}

static void embed(const Predictor *p, int residual, int64_t code, float *x) {
    size_t at = ((size_t)residual * p->vocab + (size_t)code) * p->hidden;
    if (!p->narrow_tables) {
        memcpy(x, (const float *)p->tables + at, 4 * (size_t)p->hidden);
        return;
    }
    const uint16_t *row = (const uint16_t *)p->tables + at;
    for (int i = 0; i < p->hidden; i++) {
        uint32_t bits = (uint32_t)row[i] << 16;
        memcpy(x + i, &bits, 4);
    }
}

/* hidden and first [rows, hidden]; uniforms [rows, residuals]; greedy [rows] -> codes [rows, residuals], and where
   `logits` is not null what they were drawn from, [rows, residuals, vocab]. */
void draw_frames(
    const Predictor *p, int32_t rows, const float *hidden, const float *first, const double *uniforms,
    const uint8_t *greedy, float *scratch, int64_t *codes, float *logits) {
    Strides s = strides(p);
    size_t most = 2 * (size_t)rows;
    float *x = scratch, *normed = x + most * s.hidden, *attended = normed + most * s.hidden;
    float *wide = attended + most * s.attended, *scores = wide + most * s.wide, *cache = scores + rows * s.vocab;
    float weights[p->vocab];
    uint64_t kept[p->vocab];
    int32_t ids[p->vocab];
    Room room = {weights, kept, ids};
    Drawing drawing = {.top_p = p->top_p, .temperature = 1.0f, .top_k = p->top_k};
    memset(scratch, 0, sizeof(float) * (size_t)scratch_floats(p, rows));
    for (int row = 0; row < rows; row++) {
        memcpy(x + row * s.hidden, hidden + (size_t)row * p->hidden, 4 * (size_t)p->hidden);
        memcpy(x + (rows + row) * s.hidden, first + (size_t)row * p->hidden, 4 * (size_t)p->hidden);
    }
    for (int index = 0; index < p->residuals; index++) {
        /* Positions 0 and 1 go through the layers together, then one at a time. */
        int count = index ? rows : 2 * rows;
        for (int at = 0; at < p->num_layers; at++) {
            const Layer *layer = p->layers + at;
            for (int row = 0; row < count; row++)
                rms_norm(x + row * s.hidden, layer->input_norm, p->eps * p->hidden, normed + row * s.hidden, p->hidden);
            multiply(&layer->qkv, normed, s.hidden, wide, s.wide, count, 0);
            for (int row = 0; row < count; row++)
                attend(
                    p, layer->qk_norm, wide + row * s.wide, index ? index + 1 : row / rows,
                    cache + ((size_t)at * rows + row % rows) * s.cache, s.positions, attended + row * s.attended);
            multiply(&layer->out, attended, s.attended, x, s.hidden, count, 1);
            for (int row = 0; row < count; row++)
                rms_norm(x + row * s.hidden, layer->post_norm, p->eps * p->hidden, normed + row * s.hidden, p->hidden);
            multiply(&layer->gate_up, normed, s.hidden, wide, s.wide, count, 0);
            for (int row = 0; row < count; row++) gate(wide + row * s.wide, p->intermediate);
            multiply(&layer->down, wide, s.wide, x, s.hidden, count, 1);
        }
        const float *last = x + (count - rows) * s.hidden;
        for (int row = 0; row < rows; row++)
            rms_norm(last + row * s.hidden, p->norm, p->eps * p->hidden, normed + row * s.hidden, p->hidden);
        multiply(p->draws + index, normed, s.hidden, scores, s.vocab, rows, 0);
        for (int row = 0; row < rows; row++) {
            float *of = scores + row * s.vocab;
            size_t place = (size_t)row * p->residuals + index;
            if (logits) memcpy(logits + place * p->vocab, of, 4 * (size_t)p->vocab);
            drawing.uniform = uniforms[place];
            codes[place] = greedy[row] ? first_largest(of, p->vocab) : draw(of, p->vocab, &drawing, room);
            embed(p, index, codes[place], x + row * s.hidden);
        }
    }
}
