/* From codes to the decoder's first convolution: embedding, windowed attention and upsampling. Frames are rows here, see
   `rows.h`. Included by `code2wav.c`. */

#include "code2wav.h"

/* The mean embedding of one frame, whose codes are `stride` apart. */
static __attribute__((noinline)) void embed(const Vocoder *v, const int32_t *codes, size_t stride, float *x) {
    for (int i = 0; i < v->hidden; i++) x[i] = 0.0f;
    for (int book = 0; book < v->quantizers; book++) {
        size_t code = (size_t)book * v->codebook_size + (size_t)codes[book * stride];
        const float *row = v->table + code * v->hidden;
        for (int i = 0; i < v->hidden; i++) x[i] += row[i];
    }
    for (int i = 0; i < v->hidden; i++) x[i] /= (float)v->quantizers;
}

/* x += (y + bias) * scale; `bias` may be null. */
static __attribute__((noinline)) void add_scaled(
    float *x, const float *y, const float *bias, const float *scale, int size) {
    if (bias)
        for (int i = 0; i < size; i++) x[i] += (y[i] + bias[i]) * scale[i];
    else
        for (int i = 0; i < size; i++) x[i] += y[i] * scale[i];
}

static __attribute__((noinline)) void add(const float *x, const float *bias, float *y, int size) {
    for (int i = 0; i < size; i++) y[i] = x[i] + bias[i];
}

static __attribute__((noinline)) float dot(const float *x, const float *y, int size) {
    float sum = 0.0f;
    for (int i = 0; i < size; i++) sum += x[i] * y[i];
    return sum;
}

/* x[0 .. count) -> exp((x - their largest) * scale), and from there to the next whole register zeros. Returns the sum. */
static __attribute__((noinline)) float exponentials(float *x, int count, float scale) {
    int end = (int)padded(count, LANES);
    float lanes[LANES], peak = x[0], sum = 0.0f;
    for (int i = count; i < end; i++) x[i] = peak;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = peak;
    for (int i = 0; i < end; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    for (int lane = 0; lane < LANES; lane++) peak = lanes[lane] > peak ? lanes[lane] : peak;
    for (int i = 0; i < end; i++) x[i] = exponential((x[i] - peak) * scale);
    for (int i = count; i < end; i++) x[i] = 0.0f;
    Floats total = {0};
    for (int i = 0; i < end; i += LANES) total += load(x + i);
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    return sum;
}

/* The sum of rows [count, size], each times its weight, and of one more. */
static __attribute__((noinline)) void mix(
    const float *weights, const float *rows, int count, const float *last, float *y, int size) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        Floats total = weights[count] * load(last + i);
        for (int at = 0; at < count; at++) total += weights[at] * load(rows + (size_t)at * size + i);
        *(Floats *)(y + i) = total;
    }
    for (; i < size; i++) {
        float total = weights[count] * last[i];
        for (int at = 0; at < count; at++) total += weights[at] * rows[(size_t)at * size + i];
        y[i] = total;
    }
}

/* One frame of one stream in one layer: qkv [heads + 2 kv_heads, head_dim] -> out [heads, head_dim]. `turn` has cosines,
   then sines, of the frame's position. `history` has, for each key head, keys as [head_dim, memory], then values as
   [memory, head_dim]: a ring, in which the frame replaces the oldest once it has been looked at. */
static __attribute__((noinline)) void attend(
    const Vocoder *v, float *qkv, int64_t position, const float *turn, float *history, float *out) {
    int dim = v->head_dim, half = dim / 2, group = v->heads / v->kv_heads, memory = v->memory;
    int earlier = position < memory ? (int)position : memory;
    const float *cos = turn, *sin = turn + half;
    for (int head = 0; head < v->heads + v->kv_heads; head++) {
        float *x = qkv + (size_t)head * dim;
        rotate(x, cos, sin, half);
    }
    float scale = 1.0f / __builtin_sqrtf((float)dim), scores[padded((size_t)memory + 1, LANES)];
    for (int key_head = 0; key_head < v->kv_heads; key_head++) {
        float *keys = history + 2 * (size_t)key_head * dim * memory, *values = keys + (size_t)dim * memory;
        const float *key = qkv + (size_t)(v->heads + key_head) * dim, *value = key + (size_t)v->kv_heads * dim;
        for (int head = key_head * group; head < (key_head + 1) * group; head++) {
            const float *query = qkv + (size_t)head * dim;
            float *mixed = out + (size_t)head * dim;
            /* Reads over the end of the keys, into the values; those scores are not looked at. */
            for (int at = 0; at < earlier; at += LANES) {
                Floats total = {0};
                for (int i = 0; i < dim; i++) total += query[i] * load(keys + (size_t)i * memory + at);
                memcpy(scores + at, &total, sizeof total);
            }
            scores[earlier] = dot(query, key, dim);
            float share = 1.0f / exponentials(scores, earlier + 1, scale);
            mix(scores, values, earlier, value, mixed, dim);
            for (int i = 0; i < dim; i++) mixed[i] *= share;
        }
        if (memory) {
            size_t place = (size_t)(position % memory);
            for (int i = 0; i < dim; i++) keys[(size_t)i * memory + place] = key[i];
            memcpy(values + place * dim, value, 4 * (size_t)dim);
        }
    }
}

static __attribute__((noinline)) void layer_norm(
    const float *x, const float *weight, const float *bias, float eps, float *y, int size) {
    float sum = 0.0f, squares = 0.0f;
    for (int i = 0; i < size; i++) sum += x[i];
    float mean = sum / (float)size;
    for (int i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / __builtin_sqrtf(squares / (float)size + eps);
    for (int i = 0; i < size; i++) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

/* gelu(x + bias) over x, with the error function as a ratio of polynomials, within 5e-7, as in Eigen and XLA. */
static __attribute__((noinline)) void gelu(float *x, const float *bias, int size) {
    for (int i = 0; i < size; i++) {
        float value = x[i] + bias[i], at = value * 0.707106781f;
        at = at > 4.0f ? 4.0f : at;
        at = at < -4.0f ? -4.0f : at;
        float square = at * at, above = -2.72614225801306e-10f, below = -1.45660718464996e-05f;
        above = above * square + 2.77068142495902e-08f;
        above = above * square - 2.10102402082508e-06f;
        above = above * square - 5.69250639462346e-05f;
        above = above * square - 7.34990630326855e-04f;
        above = above * square - 2.95459980854025e-03f;
        above = above * square - 1.60960333262415e-02f;
        below = below * square - 2.13374055278905e-04f;
        below = below * square - 1.68282697438203e-03f;
        below = below * square - 7.37332916720468e-03f;
        below = below * square - 1.42647390514189e-02f;
        x[i] = 0.5f * value * (1.0f + at * above / below);
    }
}

/* One row: the taps' rows of x end at it. */
static __attribute__((noinline)) void depthwise(const Vocoder *v, const Upsample *up, const float *x, float *y) {
    int size = v->hidden;
    for (int i = 0; i < size; i++) y[i] = up->depthwise_bias[i];
    for (int tap = 0; tap < v->kernel; tap++) {
        const float *from = x + (tap - v->kernel + 1) * (ptrdiff_t)size, *weights = up->depthwise + (size_t)tap * size;
        for (int i = 0; i < size; i++) y[i] += weights[i] * from[i];
    }
}

static void transform(
    const Vocoder *v, const Layer *layer, Scratch s, float *x, int frames, int64_t position, const float *turns,
    float *history) {
    int hidden = v->hidden;
    float floor = v->eps * (float)hidden;
    for (int row = 0; row < frames; row++)
        rms_norm(x + row * hidden, layer->attention_norm, floor, s.normed + row * s.narrow_stride, hidden);
    multiply(&layer->qkv, s.normed, s.narrow_stride, s.wide, s.wide_stride, frames, 0);
    for (int row = 0; row < frames; row++)
        attend(
            v, s.wide + row * s.wide_stride, position + row, turns + row * (size_t)v->head_dim, history,
            s.normed + row * s.narrow_stride);
    multiply(&layer->out, s.normed, s.narrow_stride, s.wide, s.wide_stride, frames, 0);
    for (int row = 0; row < frames; row++) {
        float *at = x + row * hidden;
        add_scaled(at, s.wide + row * s.wide_stride, NULL, layer->attention_scale, hidden);
        rms_norm(at, layer->mlp_norm, floor, s.normed + row * s.narrow_stride, hidden);
    }
    multiply(&layer->gate_up, s.normed, s.narrow_stride, s.wide, s.wide_stride, frames, 0);
    for (int row = 0; row < frames; row++) gate(s.wide + row * s.wide_stride, v->intermediate);
    multiply(&layer->down, s.wide, s.wide_stride, s.normed, s.narrow_stride, frames, 0);
    for (int row = 0; row < frames; row++)
        add_scaled(x + row * hidden, s.normed + row * s.narrow_stride, NULL, layer->mlp_scale, hidden);
}

/* The rows before x [rows, hidden] come from `history`, which is to hold its last ones. */
static float *join_rows(const Vocoder *v, float *x, int rows, int first, float *history) {
    size_t reach = (size_t)(v->kernel - 1) * v->hidden, bytes = sizeof(float) * reach;
    if (first) memset(x - reach, 0, bytes);
    else memcpy(x - reach, history, bytes);
    memcpy(history, x + (size_t)rows * v->hidden - reach, bytes);
    return history + reach;
}

/* x [rows, hidden] -> [rows * factor, hidden], over x. */
static float *upsample_rows(
    const Vocoder *v, const Upsample *up, Scratch s, float *x, int rows, int first, float *history) {
    int hidden = v->hidden, wide = up->factor * hidden, made = rows * up->factor;
    multiply(&up->conv, x, hidden, s.wide, s.wide_stride, rows, 0);
    for (int row = 0; row < rows; row++) add(s.wide + row * s.wide_stride, up->conv_bias, x + row * wide, wide);
    history = join_rows(v, x, made, first, history);
    for (int row = 0; row < made; row++) {
        float *normed = s.normed + row * s.narrow_stride;
        depthwise(v, up, x + row * hidden, normed);
        layer_norm(normed, up->norm, up->norm_bias, 1e-6f, normed, hidden);
    }
    multiply(&up->up, s.normed, s.narrow_stride, s.wide, s.wide_stride, made, 0);
    for (int row = 0; row < made; row++) gelu(s.wide + row * s.wide_stride, up->up_bias, up->up.outputs);
    multiply(&up->down, s.wide, s.wide_stride, s.normed, s.narrow_stride, made, 0);
    for (int row = 0; row < made; row++)
        add_scaled(x + row * hidden, s.normed + row * s.narrow_stride, up->down_bias, up->gamma, hidden);
    return history;
}

/* codes [quantizers, `stride` apart] of `frames` frames -> rows of the decoder's width in `s.wide`, without their bias.
   Returns what lies in the history behind what this takes of it. */
static float *run_rows(
    const Vocoder *v, Scratch s, const int32_t *codes, size_t stride, int frames, int64_t position, int first,
    float *history) {
    int hidden = v->hidden, half = v->head_dim / 2, rows = frames;
    size_t keys = 2 * (size_t)v->kv_heads * v->head_dim * v->memory;
    float *x = s.rows + (size_t)(v->kernel - 1) * hidden, turns[(size_t)frames * v->head_dim];
    for (int row = 0; row < frames; row++) {
        float *turn = turns + row * (size_t)v->head_dim;
        embed(v, codes + row, stride, x + row * hidden);
        for (int i = 0; i < half; i++) {
            float angle = (float)(position + row) * v->inverse_frequencies[i];
            turn[i] = __builtin_cosf(angle);
            turn[half + i] = __builtin_sinf(angle);
        }
    }
    for (int at = 0; at < v->num_layers; at++, history += keys)
        transform(v, v->layers + at, s, x, frames, position, turns, history);
    for (int row = 0; row < frames; row++)
        rms_norm(x + row * hidden, v->norm, v->eps * (float)hidden, x + row * hidden, hidden);
    for (int at = 0; at < v->num_upsamples; at++) {
        history = upsample_rows(v, v->upsamples + at, s, x, rows, first, history);
        rows *= v->upsamples[at].factor;
    }
    history = join_rows(v, x, rows, first, history);
    multiply(&v->conv_in, s.rows, hidden, s.wide, s.wide_stride, rows, 0);
    return history;
}
