/* From the decoder's first convolution to samples: snakes, residual units and transposed convolutions. Steps are columns
   here, see `columns.h`. Included by `code2wav.c`. */

#include "code2wav.h"

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
