/* Chunks of codec frames to samples, as `code2wav.py` decodes them, in one call without the interpreter.

   Up to the decoder's first convolution frames are rows, see `rows.h`; behind it, where steps are many and channels few,
   they are columns, see `columns.h`. One stream is decoded after the other, and a chunk in pieces that fit a cache, as the
   chunks of a stream would be: so samples depend neither on the cut of a stream nor on its company, bit for bit, and scratch
   memory does not grow with a chunk. Compiled by `layers/compiled.py`; called through `compiled_vocoder.py`, which mirrors
   the structs. */

#include "columns.h"

#define ROW_FRAMES 32 /* that go through the rows' part at a time */
#define COLUMN_FRAMES 4 /* that go through the columns' part at a time */
#define CACHED_COLUMNS 256 /* that go from a residual unit's first convolution to its second at a time */

/* Norm weights of RMS norms are times the root of their number. */
typedef struct {
    Product qkv, out, gate_up, down;
    const float *attention_norm, *attention_scale, *mlp_norm, *mlp_scale;
} Layer;

/* `conv` [factor * hidden, hidden], its bias [factor * hidden]; `depthwise` [kernel, hidden]. */
typedef struct {
    Product conv, up, down;
    const float *conv_bias, *depthwise, *depthwise_bias, *norm, *norm_bias, *up_bias, *down_bias, *gamma;
    int32_t factor;
} Upsample;

typedef struct {
    Snake snake1, snake2;
    Convolution conv1, conv2;
} Unit;

/* `upsample` gives [rate, out_channels]. */
typedef struct {
    Snake snake;
    Convolution upsample;
    const Unit *units;
    int32_t rate;
} Block;

/* `table` [quantizers * codebook_size, hidden]; `conv_in` [decoder_dim, kernel * hidden]; `inverse_frequencies`
   [head_dim / 2]; `history`: floats of a stream's state; `memory`: keys and values of how many frames it holds. */
typedef struct {
    const Layer *layers;
    const Upsample *upsamples;
    const Block *blocks;
    Product conv_in;
    Snake snake_out;
    Convolution conv_out;
    const float *table, *inverse_frequencies, *norm, *conv_in_bias;
    int64_t history;
    float eps;
    int32_t num_layers, num_upsamples, num_blocks, num_units, quantizers, codebook_size, hidden, heads, kv_heads, head_dim;
    int32_t intermediate, memory, kernel;
} Vocoder;

/* How many floats each part of the scratch memory has, and rows in it: `rows` [.., hidden], `normed` [.., narrow_stride],
   `wide` [.., wide_stride]. There are three parts of `columns`. */
typedef struct {
    size_t rows, normed, wide, columns, narrow_stride, wide_stride;
} Sizes;

typedef struct {
    float *rows, *normed, *wide, *columns, *joined, *phases;
    size_t narrow_stride, wide_stride;
} Scratch;

static size_t larger(size_t one, size_t other) { return one > other ? one : other; }

static int upsampling(const Vocoder *v) {
    int factor = 1;
    for (int at = 0; at < v->num_upsamples; at++) factor *= v->upsamples[at].factor;
    return factor;
}

/* How long a channel is in a buffer of `columns` columns that has room for `reach` earlier ones. */
static size_t channel_stride(int columns, int reach) { return padded(columns, LANES) + padded(reach, LANES); }

static Sizes sizes(const Vocoder *v) {
    int factor = upsampling(v), steps = COLUMN_FRAMES * factor;
    size_t hidden = v->hidden, rows = (size_t)ROW_FRAMES * factor, attended = (size_t)v->heads * v->head_dim;
    size_t wide = larger(attended + 2 * (size_t)v->kv_heads * v->head_dim, 2 * (size_t)v->intermediate);
    for (int at = 0; at < v->num_upsamples; at++)
        wide = larger(wide, larger(v->upsamples[at].conv.outputs, v->upsamples[at].up.outputs));
    wide = padded(larger(wide, v->conv_in.outputs), WIDTH);
    size_t narrow = padded(larger(hidden, attended), WIDTH), columns = 0;
    for (int at = 0; at < v->num_blocks; at++) {
        const Block *block = v->blocks + at;
        columns = larger(columns, block->upsample.inputs * channel_stride(steps, reach_of(&block->upsample)));
        columns = larger(columns, block->upsample.outputs * channel_stride(steps, 0));
        steps *= block->rate;
        for (int unit = 0; unit < v->num_units; unit++) {
            const Convolution *conv = &block->units[unit].conv1;
            columns = larger(columns, conv->inputs * channel_stride(steps, reach_of(conv)));
            columns = larger(columns, (size_t)conv->outputs * CACHED_COLUMNS);
        }
    }
    columns = larger(columns, v->conv_out.inputs * channel_stride(steps, reach_of(&v->conv_out)));
    return (Sizes){
        .rows = padded((rows + v->kernel) * hidden, WIDTH),
        .normed = rows * narrow,
        .wide = rows * wide,
        .columns = columns,
        .narrow_stride = narrow,
        .wide_stride = wide,
    };
}

/* How many floats `decode` needs to work with. They are zeros at their first use. */
int64_t scratch_floats(const Vocoder *v) {
    Sizes size = sizes(v);
    return (int64_t)(size.rows + size.normed + size.wide + 3 * size.columns);
}

static Scratch parts(Sizes size, float *memory) {
    Scratch s = {.rows = memory, .narrow_stride = size.narrow_stride, .wide_stride = size.wide_stride};
    s.normed = s.rows + size.rows;
    s.wide = s.normed + size.normed;
    s.columns = s.wide + size.wide;
    s.joined = s.columns + size.columns;
    s.phases = s.joined + size.columns;
    return s;
}

/* --- rows ------------------------------------------------------------------------------------------------------------ */

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
        for (int i = 0; i < half; i++) {
            float left = x[i], right = x[i + half];
            x[i] = left * cos[i] - right * sin[i];
            x[i + half] = right * cos[i] + left * sin[i];
        }
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

/* --- columns --------------------------------------------------------------------------------------------------------- */

/* x [channels, columns] -> snake(x) behind the last columns of the stream's, which `history` [channels, reach] holds. */
static float *join_columns(
    const Snake *s, const Convolution *c, const float *x, size_t x_stride, int columns, int first, float *history,
    float *joined, size_t stride) {
    size_t reach = (size_t)reach_of(c), bytes = sizeof(float) * reach;
    for (int channel = 0; channel < c->inputs; channel++, history += reach) {
        float *to = joined + channel * stride;
        if (first) memset(to, 0, bytes);
        else memcpy(to, history, bytes);
        snake(x + channel * x_stride, s->half_turns[channel], s->magnitude[channel], to + reach, columns);
        memcpy(history, to + columns, bytes);
    }
    return history;
}

/* Adds a residual unit's result to `s.columns`. */
static float *run_unit(const Unit *unit, Scratch s, int columns, int first, float *history) {
    size_t stride = channel_stride(columns, 0), joined = channel_stride(columns, reach_of(&unit->conv1));
    history = join_columns(&unit->snake1, &unit->conv1, s.columns, stride, columns, first, history, s.joined, joined);
    for (int at = 0; at < columns; at += CACHED_COLUMNS) {
        int count = columns - at < CACHED_COLUMNS ? columns - at : CACHED_COLUMNS;
        convolve(&unit->conv1, s.joined + at, joined, s.phases, CACHED_COLUMNS, count, 0);
        for (int channel = 0; channel < unit->conv2.inputs; channel++) {
            float *x = s.phases + (size_t)channel * CACHED_COLUMNS;
            snake(x, unit->snake2.half_turns[channel], unit->snake2.magnitude[channel], x, count);
        }
        convolve(&unit->conv2, s.phases, CACHED_COLUMNS, s.columns + at, stride, count, 1);
    }
    return history;
}

/* x [rate, `stride` apart] of `count` steps -> y [count, rate]. Always inlined, with `rate` known. */
static inline __attribute__((always_inline)) void interleave_by(
    const float *x, size_t stride, float *y, int rate, int count) {
    for (int at = 0; at < count; at++)
        for (int phase = 0; phase < rate; phase++) y[at * rate + phase] = x[phase * stride + at];
}

/* A known rate makes it three to ten times faster. */
static void interleave(const float *x, size_t stride, float *y, int rate, int count) {
    switch (rate) {
    case 3: interleave_by(x, stride, y, 3, count); break;
    case 4: interleave_by(x, stride, y, 4, count); break;
    case 5: interleave_by(x, stride, y, 5, count); break;
    case 8: interleave_by(x, stride, y, 8, count); break;
    default: interleave_by(x, stride, y, rate, count);
    }
}

/* `s.columns` through a block, in place. `columns` is made how many there are. */
static float *run_block(const Vocoder *v, const Block *block, Scratch s, int *columns, int first, float *history) {
    const Convolution *up = &block->upsample;
    /* A stream's first outputs, for which inputs are missing, are trimmed. */
    int reach = reach_of(up), trim = first ? reach : 0, made = *columns - trim, rate = block->rate;
    size_t joined = channel_stride(*columns, reach), phases = channel_stride(made, 0);
    history = join_columns(
        &block->snake, up, s.columns, channel_stride(*columns, 0), *columns, first, history, s.joined, joined);
    convolve(up, s.joined + trim, joined, s.phases, phases, made, 0);
    *columns = made * rate;
    size_t stride = channel_stride(*columns, 0);
    int channels = up->outputs / rate;
    for (int channel = 0; channel < channels; channel++)
        interleave(s.phases + channel * phases, channels * phases, s.columns + channel * stride, rate, made);
    for (int unit = 0; unit < v->num_units; unit++)
        history = run_unit(block->units + unit, s, *columns, first, history);
    return history;
}

/* Rows of the decoder's width without their bias -> samples; returns how many. */
static int run_columns(
    const Vocoder *v, Scratch s, const float *rows, int count, int first, float *history, float *samples) {
    size_t stride = channel_stride(count, 0);
    int columns = count;
    for (int channel = 0; channel < v->conv_in.outputs; channel++)
        for (int at = 0; at < count; at++)
            s.columns[channel * stride + at] = rows[at * s.wide_stride + channel] + v->conv_in_bias[channel];
    for (int at = 0; at < v->num_blocks; at++) history = run_block(v, v->blocks + at, s, &columns, first, history);
    const Convolution *last = &v->conv_out;
    size_t joined = channel_stride(columns, reach_of(last));
    join_columns(
        &v->snake_out, last, s.columns, channel_stride(columns, 0), columns, first, history, s.joined, joined);
    convolve(last, s.joined, joined, s.phases, channel_stride(columns, 0), columns, 0);
    for (int at = 0; at < columns; at++) {
        float sample = s.phases[at];
        sample = sample > 1.0f ? 1.0f : sample;
        samples[at] = sample < -1.0f ? -1.0f : sample;
    }
    return columns;
}

/* codes [streams, quantizers, frames] of the streams in `slots` -> samples [streams, as many as frames give]. `histories`
   [num_slots, history] and `num_frames` [num_slots] are read, unless `first`, and brought up to date. Returns 0 and does
   nothing where a code or a slot is out of its range. */
int32_t decode(
    const Vocoder *v, int32_t streams, int32_t frames, int32_t first, const int32_t *codes, const int64_t *slots,
    int64_t num_slots, float *histories, int64_t *num_frames, float *scratch, float *samples) {
    size_t count = (size_t)v->quantizers * frames;
    for (int stream = 0; stream < streams; stream++)
        if (slots[stream] < 0 || slots[stream] >= num_slots) return 0;
    for (size_t at = 0; at < streams * count; at++)
        if (codes[at] < 0 || codes[at] >= v->codebook_size) return 0;
    Scratch s = parts(sizes(v), scratch);
    int factor = upsampling(v), most = COLUMN_FRAMES * factor;
    for (int stream = 0; stream < streams; stream++, codes += count) {
        float *history = histories + slots[stream] * v->history;
        int64_t position = first ? 0 : num_frames[slots[stream]];
        num_frames[slots[stream]] = position + frames;
        /* An odd number of inputs is multiplied with what lies behind it, see `multiply`. */
        memset(s.rows, 0, sizeof(float) * (size_t)(s.wide - s.rows));
        for (int done = 0; done < frames; done += ROW_FRAMES) {
            int taken = frames - done < ROW_FRAMES ? frames - done : ROW_FRAMES, rows = taken * factor;
            float *rest = run_rows(v, s, codes + done, frames, taken, position + done, first && !done, history);
            for (int row = 0; row < rows; row += most)
                samples += run_columns(
                    v, s, s.wide + row * s.wide_stride, rows - row < most ? rows - row : most, first && !done && !row,
                    rest, samples);
        }
    }
    return 1;
}
