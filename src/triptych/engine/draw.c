/* A token from each row of logits, each row by its own parameters. Called through `compiled_draw.py`. */

#include "draw.h"

/* x [rows, size] and the parameters [rows] -> tokens [rows]; what is [size] is to work in. */
void draw_rows(
    int32_t rows, int32_t size, const float *x, const double *uniforms, const float *temperature, const int32_t *top_k,
    const double *top_p, const float *least, float *weights, uint64_t *kept, int32_t *ids, int64_t *tokens) {
    for (int row = 0; row < rows; row++) {
        Drawing drawing = {top_p[row], uniforms[row], temperature[row], least[row], top_k[row]};
        tokens[row] = draw(x + (size_t)row * size, size, &drawing, (Room){weights, kept, ids});
    }
}
