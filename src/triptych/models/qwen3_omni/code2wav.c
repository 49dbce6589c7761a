/* Chunks of codec frames to samples, as `code2wav.py` decodes them, in one call without the interpreter.

   Up to the decoder's first convolution frames are rows, see `rows.h`; behind it, where steps are many and channels few,
   they are columns, see `columns.h`. One stream is decoded after the other, and a chunk in pieces that fit a cache, as the
   chunks of a stream would be: so samples depend neither on the cut of a stream nor on its company, bit for bit, and scratch
   memory does not grow with a chunk. Compiled by `layers/compiled.py`; called through `compiled_vocoder.py`, which mirrors
   the structs. */

#include "code2wav_columns.h"
#include "code2wav_rows.h"

/* How many floats `decode` needs to work with. They are zeros at their first use. */
int64_t scratch_floats(const Vocoder *v) {
    Sizes size = sizes(v);
    return (int64_t)(size.rows + size.normed + size.wide + 3 * size.columns);
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
