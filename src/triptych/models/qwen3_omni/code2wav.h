/* What `code2wav.c` works on: the vocoder's parts, and the memory that they need. `compiled_vocoder.py` mirrors the
   structs. */

#ifndef CODE2WAV_H
#define CODE2WAV_H

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

static Scratch parts(Sizes size, float *memory) {
    Scratch s = {.rows = memory, .narrow_stride = size.narrow_stride, .wide_stride = size.wide_stride};
    s.normed = s.rows + size.rows;
    s.wide = s.normed + size.normed;
    s.columns = s.wide + size.wide;
    s.joined = s.columns + size.columns;
    s.phases = s.joined + size.columns;
    return s;
}

#endif
