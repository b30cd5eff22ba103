// The steps of the operator: summaries of blocks, their mixing, reading them out, and the gradients of each.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "native_call.hpp"
#include "native_products.hpp"

namespace {

constexpr int64_t chunk = 48;        // tokens, a multiple of the rows of the larger tiles
constexpr int64_t panel = 48;        // columns of summaries that are mixed at once
constexpr int64_t strip = 576;       // columns of summaries that are multiplied by one another; a multiple of panel
constexpr int64_t cached = 1 << 21;  // floats of summaries that are made of several heads together, over all threads
constexpr int64_t ahead = 8;         // tokens that are fetched from memory before they are needed

constexpr float shift = 1e-6f;  // of relu_eps

float from_bfloat16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

uint16_t to_bfloat16(float x) {  // rounded to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// Lengths in floats, and numbers of things, that follow from a call.
struct Sizes {
    int64_t columns, row;  // of a token's values and of its features, as whole vectors
    int64_t summary;       // S, z and padding
    int64_t of_head;       // the summaries of all blocks
    int64_t slabs, slab;   // how many, and the blocks of each
    int64_t group, groups; // heads that are computed together, and how many such groups all samples have
    int64_t units;         // groups that are computed at a time
    int64_t memory;        // of a unit
    int64_t values, results, transposed, z_copy;  // where these begin in the buffer of a thread, behind the features
    int64_t buffer;                               // the whole of it

    // `copies` is how often all summaries are in memory.
    Sizes(const Call& c, int64_t copies, bool backward) {
        columns = round_up(c.width, lanes);
        row = round_up(c.dim, lanes);
        // An odd number of cache lines, so that summaries do not fall on the same places of the cache.
        summary = (round_up(c.dim * columns + row, 16) / 16 | 1) * 16;
        of_head = c.blocks * summary;
        slabs = c.counts[0];
        slab = c.blocks / slabs;
        group = std::clamp<int64_t>(cached / (c.threads * copies * of_head), 1, c.heads);
        while (c.heads % group) --group;
        groups = c.batch * c.heads / group;
        units = std::min(c.threads, groups);
        memory = copies * group * of_head;
        values = chunk * row;
        results = values + chunk * columns;
        transposed = results + chunk * std::max(row, columns);
        z_copy = transposed + (backward ? columns * row : 0);
        buffer = z_copy + (backward ? row : 0);
        for (int64_t f = 0; f < c.num_factors; ++f) buffer = std::max(buffer, c.counts[f] * panel);
        buffer = round_up(buffer, 16);
    }

    int64_t scratch(const Call& c) const { return units * memory + c.threads * buffer; }
};

// What one thread does for one unit: a group of heads of sample b. Heads are numbered within their group. A step that
// is given summaries, in the plural, does all heads: the pointer is to those of the group's first head, and those of
// the next head lie `of_head` behind. All other steps do one head.
struct Worker {
    const Call& c;
    const Sizes& s;
    float* buffer;
    int64_t thread, b, head_offset;

    const uint8_t* mask() const { return c.key_mask ? c.key_mask + b * c.tokens : nullptr; }

    float& denominator(int64_t head, int64_t place, int64_t block) const {
        const int64_t row = (b * c.heads + head_offset + head) * c.blocks + block;
        return c.kept[row * c.block_size + place - c.first_place[block]];
    }

    int64_t in_contiguous(int64_t head, int64_t token, int64_t length) const {
        return ((b * c.tokens + token) * c.heads + head_offset + head) * length;
    }

    int64_t in(const Tokens& tokens, int64_t head, int64_t token) const {
        return b * tokens.batch + (head_offset + head) * tokens.head + token * tokens.token;
    }

    // Calls `work(head, place, count, tokens, is_first)` for all chunks of a block's tokens, and for each one for some
    // heads, because these lie side by side in memory.
    template <typename Work>
    void chunks(int64_t block, int64_t first_head, int64_t end_head, Work work) const {
        const int64_t first = c.first_place[block], end = c.first_place[block + 1];
        for (int64_t place = first; place < end; place += chunk)
            for (int64_t head = first_head; head < end_head; ++head)
                work(head, place, std::min(chunk, end - place), c.token_of_place + place, place == first);
    }

    // Features of the tokens of a chunk, a row each: zeros where the mask hides them, and behind their elements.
    void gather(const Tokens& from, int64_t head, int64_t place, int64_t count, int64_t length, FeatureMap map,
                const uint8_t* mask, float* to) const {
        const int64_t row = round_up(length, lanes), bytes = from.dtype == float32 ? 4 : 2;
        const int64_t* tokens = c.token_of_place + place;
        for (int64_t t = 0; t < count; ++t, to += row) {
            if (place + t + ahead < c.tokens) {
                const char* later = static_cast<const char*>(from.data) + in(from, head, tokens[t + ahead]) * bytes;
                for (int64_t byte = 0; byte < length * bytes; byte += 64) __builtin_prefetch(later + byte);
            }
            std::fill(to + length, to + row, 0.0f);
            if (mask && !mask[tokens[t]]) {
                std::fill(to, to + length, 0.0f);
                continue;
            }
            const int64_t at = in(from, head, tokens[t]);
            if (from.dtype == float32) {
                const float* x = static_cast<const float*>(from.data) + at;
                if (map == identity)
                    for (int64_t d = 0; d < length; ++d) to[d] = x[d];
                else
                    for (int64_t d = 0; d < length; ++d) to[d] = x[d] < 0 ? 0 : x[d];
            } else {
                const uint16_t* x = static_cast<const uint16_t*>(from.data) + at;
                for (int64_t d = 0; d < length; ++d) to[d] = from_bfloat16(x[d]);
                if (map != identity)
                    for (int64_t d = 0; d < length; ++d) to[d] = to[d] < 0 ? 0 : to[d];
            }
            if (map == relu_eps)
                for (int64_t d = 0; d < length; ++d) to[d] += shift;
        }
    }

    FeatureMap feature_map() const { return FeatureMap(c.feature_map); }
    void gather_queries(int64_t head, int64_t place, int64_t count, float* to) const {
        gather(c.query, head, place, count, c.dim, feature_map(), nullptr, to);
    }
    void gather_keys(int64_t head, int64_t place, int64_t count, float* to) const {
        gather(c.key, head, place, count, c.dim, feature_map(), mask(), to);
    }
    void gather_values(const Tokens& values, int64_t head, int64_t place, int64_t count, float* to) const {
        gather(values, head, place, count, c.width, identity, nullptr, to);
    }

    static void write(const float* from, int64_t length, void* to, int64_t at, int64_t dtype) {
        if (dtype == float32) {
            std::copy(from, from + length, static_cast<float*>(to) + at);
        } else {
            uint16_t* x = static_cast<uint16_t*>(to) + at;
            for (int64_t e = 0; e < length; ++e) x[e] = to_bfloat16(from[e]);
        }
    }

    // A gradient of features, through the feature map, to that of what the features were made of.
    void write_gradient(float* gradient, const Tokens& of, int64_t head, int64_t token, void* to) const {
        if (feature_map() != identity) {
            const int64_t at = in(of, head, token);
            if (of.dtype == float32) {
                const float* x = static_cast<const float*>(of.data) + at;
                for (int64_t d = 0; d < c.dim; ++d) gradient[d] = x[d] <= 0 ? 0 : gradient[d];
            } else {
                const uint16_t* x = static_cast<const uint16_t*>(of.data) + at;
                for (int64_t d = 0; d < c.dim; ++d) gradient[d] = from_bfloat16(x[d]) <= 0 ? 0 : gradient[d];
            }
        }
        write(gradient, c.dim, to, in_contiguous(head, token, c.dim), of.dtype);
    }

    // Zeros to z of one block and head, and to S as well if the block has no tokens, so that nothing else writes it.
    void clear(int64_t block, float* summary) const {
        const bool is_empty = c.first_place[block] == c.first_place[block + 1];
        std::fill(summary + (is_empty ? 0 : c.dim * s.columns), summary + s.summary, 0.0f);
    }

    // S and z of one block.
    void summarise(int64_t block, float* summaries) const {
        float *keys = buffer, *values = buffer + s.values;
        for (int64_t head = 0; head < s.group; ++head) clear(block, summaries + head * s.of_head);
        chunks(block, 0, s.group, [&](int64_t head, int64_t place, int64_t count, const int64_t*, bool is_first) {
            float *summary = summaries + head * s.of_head, *z = summary + c.dim * s.columns;
            gather_keys(head, place, count, keys);
            gather_values(c.value, head, place, count, values);
            multiply(summary, s.columns, {keys, 1, s.row}, {values, s.columns, 1}, c.dim, s.columns, count, !is_first);
            for (int64_t d = 0; c.normalize && d < s.row; d += lanes) {
                vec sum{};
                for (int64_t t = 0; t < count; ++t) sum += load(keys + t * s.row + d);
                store(z + d, load(z + d) + sum);
            }
        });
    }

    // to_i = Σ_j factor[i, j] from_j for rows that are `row` apart, in columns `begin` to `end`; may be in place.
    void mix(Matrix factor, int64_t rows, const float* from, float* to, int64_t row, int64_t begin, int64_t end) const {
        for (; begin < end; begin += panel) {
            const int64_t columns = std::min(panel, end - begin);
            for (int64_t j = 0; j < rows; ++j)
                for (int64_t x = 0; x < columns; x += lanes)
                    store(buffer + j * panel + x, load(from + j * row + begin + x));
            multiply(to + begin, row, factor, {buffer, panel, 1}, rows, columns, rows, false);
        }
    }

    Matrix factor(int64_t axis) const { return {c.factors[axis], c.counts[axis], 1}; }
    Matrix transposed_factor(int64_t axis) const { return {c.factors[axis], 1, c.counts[axis]}; }

    // Calls `work(offset, row)` for all groups of rows along an axis within a slab: where it begins, and the distance
    // between rows, which is also their length.
    template <typename Work>
    void along(int64_t axis, Work work) const {
        int64_t row = s.summary;
        for (int64_t faster = axis + 1; faster < c.num_factors; ++faster) row *= c.counts[faster];
        for (int64_t offset = 0; offset < s.slab * s.summary; offset += c.counts[axis] * row) work(offset, row);
    }

    // A slab mixed along all axes behind `axis`.
    void mix_behind(int64_t axis, const float* from, float* to) const {
        for (int64_t a = c.num_factors - 1; a > axis; --a, from = to)
            along(a, [&](int64_t offset, int64_t row) {
                mix(factor(a), c.counts[a], from + offset, to + offset, row, 0, row);
            });
        if (from != to) std::copy(from, from + s.slab * s.summary, to);
    }

    // The outputs of the queries of one block, from its mixed summaries.
    void read_out(int64_t block, const float* summaries) const {
        float *queries = buffer, *results = buffer + s.results;
        chunks(block, 0, s.group, [&](int64_t head, int64_t place, int64_t count, const int64_t* tokens, bool) {
            const float *summary = summaries + head * s.of_head, *z = summary + c.dim * s.columns;
            gather_queries(head, place, count, queries);
            multiply(results, s.columns, {queries, s.row, 1}, {summary, s.columns, 1}, count, s.columns, c.dim, false);
            for (int64_t t = 0; t < count; ++t) {
                float* result = results + t * s.columns;
                if (c.normalize) {
                    const float divisor = dot(queries + t * s.row, z, c.dim) + c.eps;
                    if (c.kept) denominator(head, place + t, block) = divisor;
                    for (int64_t e = 0; e < s.columns; ++e) result[e] /= divisor;
                }
                write(result, c.width, c.out, in_contiguous(head, tokens[t], c.width), c.value.dtype);
            }
        });
    }

    // The gradient of the queries of one block and head; its mixed summary is replaced by the gradient of that.
    //
    // With g the gradient of the output over the denominator, the numerator's share of the features' gradient is S̃ g.
    // The quotient's derivative by its denominator is −g·numerator / denominator = −q·(S̃ g) / denominator.
    void read_back(int64_t block, int64_t head, float* summary) const {
        float *queries = buffer, *grads = buffer + s.values, *query_grads = buffer + s.results;
        float *transposed = buffer + s.transposed, *z = buffer + s.z_copy;
        float* z_grad = summary + c.dim * s.columns;
        transpose(summary, c.dim, s.columns, transposed);
        std::copy(z_grad, z_grad + s.row, z);
        clear(block, summary);
        chunks(block, head, head + 1, [&](int64_t, int64_t place, int64_t count, const int64_t* tokens, bool first) {
            gather_queries(head, place, count, queries);
            gather_values(c.out_grad, head, place, count, grads);
            for (int64_t t = 0; c.normalize && t < count; ++t) {
                const float divisor = denominator(head, place + t, block);
                for (int64_t e = 0; e < s.columns; ++e) grads[t * s.columns + e] /= divisor;
            }
            multiply(query_grads, s.row, {grads, s.columns, 1}, {transposed, s.row, 1}, count, s.row, c.width, false);
            for (int64_t t = 0; t < count; ++t) {
                float *query = queries + t * s.row, *query_grad = query_grads + t * s.row;
                if (c.normalize) {
                    const float downward = -dot(query, query_grad, c.dim) / denominator(head, place + t, block);
                    for (int64_t d = 0; d < c.dim; ++d) query_grad[d] += downward * z[d];
                    for (int64_t d = 0; d < c.dim; ++d) z_grad[d] += downward * query[d];
                }
                if (c.query_grad) write_gradient(query_grad, c.query, head, tokens[t], c.query_grad);
            }
            multiply(summary, s.columns, {queries, 1, s.row}, {grads, s.columns, 1}, c.dim, s.columns, count, !first);
        });
    }

    // The gradients of the keys and values of one block, from those of its summaries.
    void summarise_back(int64_t block, const float* summary_grads) const {
        float *keys = buffer, *values = buffer + s.values, *grads = buffer + s.results;
        float* transposed = buffer + s.transposed;
        chunks(block, 0, s.group, [&](int64_t head, int64_t place, int64_t count, const int64_t* tokens, bool) {
            const float *summary_grad = summary_grads + head * s.of_head, *z_grad = summary_grad + c.dim * s.columns;
            gather_keys(head, place, count, keys);
            if (c.key_grad) {
                gather_values(c.value, head, place, count, values);
                transpose(summary_grad, c.dim, s.columns, transposed);
                multiply(grads, s.row, {values, s.columns, 1}, {transposed, s.row, 1}, count, s.row, c.width, false);
                for (int64_t t = 0; t < count; ++t) {
                    float* key_grad = grads + t * s.row;
                    for (int64_t d = 0; c.normalize && d < c.dim; ++d) key_grad[d] += z_grad[d];
                    if (mask() && !mask()[tokens[t]]) std::fill(key_grad, key_grad + c.dim, 0.0f);
                    write_gradient(key_grad, c.key, head, tokens[t], c.key_grad);
                }
            }
            if (c.value_grad) {
                const Matrix summary{summary_grad, s.columns, 1};
                multiply(grads, s.columns, {keys, s.row, 1}, summary, count, s.columns, c.dim, false);
                for (int64_t t = 0; t < count; ++t) {
                    const int64_t at = in_contiguous(head, tokens[t], c.width);
                    write(grads + t * s.columns, c.width, c.value_grad, at, c.value.dtype);
                }
            }
        });
    }

    // Adds the gradient of a factor: of row i of what it made, times row j of what it was given.
    void factor_gradient(int64_t axis, const float* made, const float* given, int64_t row, int64_t begin,
                         int64_t end) const {
        if (!c.factor_grads[axis]) return;
        const int64_t rows = c.counts[axis];
        float* sums = c.factor_grads[axis] + thread * rows * rows;
        for (; begin < end; begin += strip) {
            const int64_t length = std::min(strip, end - begin);
            int64_t i = 0;
            for (; i + 4 <= rows; i += 4)
                dots_with_all<4>(sums + i * rows, made + i * row + begin, given + begin, rows, row, length);
            for (; i < rows; ++i)
                dots_with_all<1>(sums + i * rows, made + i * row + begin, given + begin, rows, row, length);
        }
    }

    // For one slab and all axes behind `axis`: the gradients of their factors, and from the gradients of what they made
    // those of what they were given, in place. `spare` is as large as the slab.
    void unmix_behind(int64_t axis, const float* slab, float* spare, float* grads) const {
        for (int64_t a = axis + 1; a < c.num_factors; ++a) {
            const bool is_last = a + 1 == c.num_factors;
            if (!is_last) mix_behind(a, slab, spare);
            const float* given = is_last ? slab : spare;
            along(a, [&](int64_t offset, int64_t row) {
                factor_gradient(a, grads + offset, given + offset, row, 0, row);
                mix(transposed_factor(a), c.counts[a], grads + offset, grads + offset, row, 0, row);
            });
        }
    }
};

}  // namespace
