// The operator for CPUs, forward and backward, in float32: see native.py, which compiles this file and calls it.
//
// A unit is one head of one sample. Its summaries lie one after the other in scratch memory, each a matrix S (D rows of
// E columns, padded to whole vectors) with the normaliser's vector z (D) behind it. They are made from chunks of tokens
// that fit into the first cache, mixed in place, and read out with chunks of queries. Every step is a product of the
// same kind, done by `multiply`, whose inner tiles stay in registers.
//
// Separable mixing goes axis by axis. A slab is all blocks of one index on the first axis: what happens along the other
// axes happens within a slab. With full mixing, which is one factor for all blocks, a slab is one block.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <omp.h>

extern "C" {

struct Tokens {
    const void* data;
    int64_t batch, token, head;  // strides in elements; the elements of a head lie side by side
    int64_t dtype;
};

struct Call {
    Tokens query, key, value;
    const uint8_t* key_mask;        // (batch, tokens) or null
    const int64_t* token_of_place;  // tokens in the order of their blocks
    const int64_t* first_place;     // of each block, and behind them the number of tokens
    const float* factors[3];        // of the mixing: one (blocks, blocks), or one per axis
    int64_t counts[3];              // rows of each factor
    int64_t num_factors;
    int64_t batch, tokens, heads, dim, width, blocks, block_size;
    int64_t feature_map, normalize;
    float eps;
    int64_t threads;
    float* scratch;  // as many floats as mhla_forward_scratch or mhla_backward_scratch says
    float* kept;     // denominators (batch, heads, blocks, block_size), or null if forward need not keep them
    void* out;       // of forward; contiguous, in the dtype of the values

    Tokens out_grad;                             // from here on for backward only
    void *query_grad, *key_grad, *value_grad;    // contiguous, in the dtype of what they belong to, or null
    float* factor_grads[3];                      // (threads, rows, rows) or null; added to
};

}  // extern "C"

namespace {

constexpr int64_t lanes = 8;
typedef float vec __attribute__((vector_size(lanes * sizeof(float)), aligned(4), may_alias));

constexpr int64_t chunk = 48;   // tokens, a multiple of the rows of the larger tiles
constexpr int64_t panel = 48;   // columns of summaries that are mixed at once
constexpr int64_t strip = 576;  // columns of summaries that are multiplied by one another at once; a multiple of panel
constexpr int64_t ahead = 8;    // tokens that are fetched from memory before they are needed

enum DType : int64_t { float32 = 0, bfloat16 = 1 };
enum FeatureMap : int64_t { identity = 0, relu = 1, relu_eps = 2 };
constexpr float shift = 1e-6f;  // of relu_eps

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Compilers like to read a vector from memory in each instruction that uses it, which is once too often for the ports.
#if defined(__x86_64__) && defined(__AVX__)
#define IN_REGISTER(x) asm("" : "+x"(x))
#else
#define IN_REGISTER(x)
#endif

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<vec*>(p) = x; }

inline float sum_of(vec x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

inline float dot(const float* a, const float* b, int64_t length) {
    vec sum{};
    for (int64_t i = 0; i < length; i += lanes) sum += load(a + i) * load(b + i);
    return sum_of(sum);
}

// A matrix whose element [r, c] lies at data + r * row + c * column.
struct Matrix {
    const float* data;
    int64_t row, column;
};

// Some rows and columns of out (+)= a b.
template <int rows, int vectors>
inline void tile(float* out, int64_t out_row, Matrix a, Matrix b, int64_t terms, bool add) {
    vec sum[rows][vectors];
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) sum[r][v] = add ? load(out + r * out_row + v * lanes) : vec{};
    for (int64_t k = 0; k < terms; ++k) {
        vec from_b[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            from_b[v] = load(b.data + k * b.row + v * lanes);
            IN_REGISTER(from_b[v]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; ++r) {
            const float from_a = a.data[r * a.row + k * a.column];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) sum[r][v] += from_a * from_b[v];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) store(out + r * out_row + v * lanes, sum[r][v]);
}

template <int most_rows, int vectors>
void tiles_below(float* out, int64_t out_row, Matrix a, Matrix b, int64_t rows, int64_t terms, bool add) {
    for (; rows >= most_rows; rows -= most_rows, out += most_rows * out_row, a.data += most_rows * a.row)
        tile<most_rows, vectors>(out, out_row, a, b, terms, add);
    if constexpr (most_rows > 1)
        if (rows > 0) tiles_below<most_rows - 1, vectors>(out, out_row, a, b, rows, terms, add);
}

// out (+)= a b: rows × terms by terms × columns. Rows of out and b are contiguous, and columns whole vectors.
void multiply(float* out, int64_t out_row, Matrix a, Matrix b, int64_t rows, int64_t columns, int64_t terms, bool add) {
    for (int64_t vectors = columns / lanes; vectors > 0;) {
        const int64_t taken = vectors == 4 ? 2 : std::min<int64_t>(vectors, 3);
        if (taken == 3) tiles_below<4, 3>(out, out_row, a, b, rows, terms, add);
        if (taken == 2) tiles_below<6, 2>(out, out_row, a, b, rows, terms, add);
        if (taken == 1) tiles_below<8, 1>(out, out_row, a, b, rows, terms, add);
        vectors -= taken, out += taken * lanes, b.data += taken * lanes;
    }
}

// sums[i, j] += a_i · b_j over `length` elements, whole vectors, where rows of a and b are `row` apart.
template <int a_rows, int b_rows>
inline void dots(float* sums, int64_t sums_row, const float* a, const float* b, int64_t row, int64_t length) {
    vec sum[a_rows][b_rows] = {};
    for (int64_t x = 0; x < length; x += lanes) {
        vec from_b[b_rows];
#pragma GCC unroll 4
        for (int j = 0; j < b_rows; ++j) {
            from_b[j] = load(b + j * row + x);
            IN_REGISTER(from_b[j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < a_rows; ++i) {
            vec from_a = load(a + i * row + x);
            IN_REGISTER(from_a);
#pragma GCC unroll 4
            for (int j = 0; j < b_rows; ++j) sum[i][j] += from_a * from_b[j];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < a_rows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < b_rows; ++j) sums[i * sums_row + j] += sum_of(sum[i][j]);
}

template <int a_rows>
void dots_with_all(float* sums, const float* a, const float* b, int64_t rows, int64_t row, int64_t length) {
    int64_t j = 0;
    for (; j + 3 <= rows; j += 3) dots<a_rows, 3>(sums + j, rows, a, b + j * row, row, length);
    for (; j < rows; ++j) dots<a_rows, 1>(sums + j, rows, a, b + j * row, row, length);
}

typedef int32_t places_in_two __attribute__((vector_size(lanes * sizeof(int32_t))));
#define PICK(a, b, ...) __builtin_shuffle(a, b, places_in_two{__VA_ARGS__})

// Four columns of eight rows, as rows: x[i] holds them of row i and then of row i + 4.
inline void store_transposed(float* to, int64_t to_row, const vec (&x)[4]) {
    const vec a = PICK(x[0], x[1], 0, 8, 1, 9, 4, 12, 5, 13), b = PICK(x[0], x[1], 2, 10, 3, 11, 6, 14, 7, 15);
    const vec c = PICK(x[2], x[3], 0, 8, 1, 9, 4, 12, 5, 13), d = PICK(x[2], x[3], 2, 10, 3, 11, 6, 14, 7, 15);
    store(to, PICK(a, c, 0, 1, 8, 9, 4, 5, 12, 13));
    store(to + to_row, PICK(a, c, 2, 3, 10, 11, 6, 7, 14, 15));
    store(to + 2 * to_row, PICK(b, d, 0, 1, 8, 9, 4, 5, 12, 13));
    store(to + 3 * to_row, PICK(b, d, 2, 3, 10, 11, 6, 7, 14, 15));
}

// to (columns, rows) = from (rows, columns) transposed; columns are whole vectors, rows padded with zeros to whole ones.
void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
    static const float zeros[lanes] = {};
    const int64_t to_row = up(rows, lanes);
    for (int64_t r = 0; r < rows; r += lanes)
        for (int64_t c = 0; c < columns; c += lanes) {
            vec left[4], right[4];
#pragma GCC unroll 4
            for (int64_t i = 0; i < 4; ++i) {
                const vec upper = load(r + i < rows ? from + (r + i) * columns + c : zeros);
                const vec lower = load(r + i + 4 < rows ? from + (r + i + 4) * columns + c : zeros);
                left[i] = PICK(upper, lower, 0, 1, 2, 3, 8, 9, 10, 11);
                right[i] = PICK(upper, lower, 4, 5, 6, 7, 12, 13, 14, 15);
            }
            store_transposed(to + c * to_row + r, to_row, left);
            store_transposed(to + (c + 4) * to_row + r, to_row, right);
        }
}

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

struct Sizes {
    int64_t columns, row, summary, slabs, slab, units, buffers;
    explicit Sizes(const Call& c, bool backward) {
        columns = up(c.width, lanes);
        row = up(c.dim, lanes);
        // An odd number of cache lines, so that summaries do not fall on the same places of the cache.
        summary = (up(c.dim * columns + row, 16) / 16 | 1) * 16;
        slabs = c.counts[0];
        slab = c.blocks / slabs;
        units = std::min(c.threads, c.batch * c.heads);
        buffers = chunk * (row + columns + std::max(row, columns));
        if (backward) buffers += columns * row + row;
        for (int64_t f = 0; f < c.num_factors; ++f) buffers = std::max(buffers, c.counts[f] * panel);
        buffers = up(buffers, 16);
    }
};

// What one thread does for one unit: sample b, head h.
struct Worker {
    const Call& c;
    const Sizes& s;
    float* buffer;
    int64_t thread, b, h;

    const uint8_t* mask() const { return c.key_mask ? c.key_mask + b * c.tokens : nullptr; }

    float& kept(int64_t block, int64_t token) const {
        return c.kept[((b * c.heads + h) * c.blocks + block) * c.block_size + token];
    }

    int64_t in_contiguous(int64_t token, int64_t length) const {
        return ((b * c.tokens + token) * c.heads + h) * length;
    }

    // Calls `work(place, count, tokens)` for all chunks of a block's tokens.
    template <typename Work>
    void chunks(int64_t block, Work work) const {
        const int64_t end = c.first_place[block + 1];
        for (int64_t place = c.first_place[block]; place < end; place += chunk)
            work(place, std::min(chunk, end - place), c.token_of_place + place);
    }

    // Features of the tokens of a chunk, a row each: zeros where the mask hides them, and behind their elements.
    void gather(const Tokens& from, int64_t place, int64_t count, int64_t length, FeatureMap map, const uint8_t* mask,
                float* to) const {
        const int64_t start = b * from.batch + h * from.head, row = up(length, lanes);
        const int64_t bytes = from.dtype == float32 ? 4 : 2;
        const int64_t* tokens = c.token_of_place + place;
        for (int64_t t = 0; t < count; ++t, to += row) {
            if (place + t + ahead < c.tokens) {
                const int64_t later = start + tokens[t + ahead] * from.token;
                for (int64_t byte = 0; byte < length * bytes; byte += 64)
                    __builtin_prefetch(static_cast<const char*>(from.data) + later * bytes + byte);
            }
            std::fill(to + length, to + row, 0.0f);
            if (mask && !mask[tokens[t]]) {
                std::fill(to, to + length, 0.0f);
                continue;
            }
            const int64_t at = start + tokens[t] * from.token;
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
    void gather_queries(int64_t place, int64_t count, float* to) const {
        gather(c.query, place, count, c.dim, feature_map(), nullptr, to);
    }
    void gather_keys(int64_t place, int64_t count, float* to) const {
        gather(c.key, place, count, c.dim, feature_map(), mask(), to);
    }
    void gather_values(int64_t place, int64_t count, float* to) const {
        gather(c.value, place, count, c.width, identity, nullptr, to);
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
    void write_gradient(float* gradient, const Tokens& of, int64_t token, void* to) const {
        if (feature_map() != identity) {
            const int64_t at = b * of.batch + h * of.head + token * of.token;
            if (of.dtype == float32) {
                const float* x = static_cast<const float*>(of.data) + at;
                for (int64_t d = 0; d < c.dim; ++d) gradient[d] = x[d] <= 0 ? 0 : gradient[d];
            } else {
                const uint16_t* x = static_cast<const uint16_t*>(of.data) + at;
                for (int64_t d = 0; d < c.dim; ++d) gradient[d] = from_bfloat16(x[d]) <= 0 ? 0 : gradient[d];
            }
        }
        write(gradient, c.dim, to, in_contiguous(token, c.dim), of.dtype);
    }

    // S and z of one block.
    void summarise(int64_t block, float* summary) const {
        float *keys = buffer, *values = keys + chunk * s.row, *z = summary + c.dim * s.columns;
        bool add = false;
        std::fill(z, summary + s.summary, 0.0f);
        chunks(block, [&](int64_t place, int64_t count, const int64_t*) {
            gather_keys(place, count, keys);
            gather_values(place, count, values);
            multiply(summary, s.columns, {keys, 1, s.row}, {values, s.columns, 1}, c.dim, s.columns, count, add);
            if (c.normalize)
                for (int64_t t = 0; t < count; ++t)
                    for (int64_t d = 0; d < c.dim; ++d) z[d] += keys[t * s.row + d];
            add = true;
        });
        if (!add) std::fill(summary, z, 0.0f);
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

    // The outputs of the queries of one block, from its mixed summary.
    void read_out(int64_t block, const float* summary) const {
        float *queries = buffer, *results = queries + chunk * s.row;
        const float* z = summary + c.dim * s.columns;
        chunks(block, [&](int64_t place, int64_t count, const int64_t* tokens) {
            gather_queries(place, count, queries);
            multiply(results, s.columns, {queries, s.row, 1}, {summary, s.columns, 1}, count, s.columns, c.dim, false);
            for (int64_t t = 0; t < count; ++t) {
                float* result = results + t * s.columns;
                if (c.normalize) {
                    const float denominator = dot(queries + t * s.row, z, s.row) + c.eps;
                    if (c.kept) kept(block, place + t - c.first_place[block]) = denominator;
                    for (int64_t e = 0; e < s.columns; ++e) result[e] /= denominator;
                }
                write(result, c.width, c.out, in_contiguous(tokens[t], c.width), c.value.dtype);
            }
        });
    }

    // The gradient of the queries of one block; its mixed summary is replaced by the gradient of that.
    //
    // With g the gradient of the output over the denominator, the numerator's share of the features' gradient is S̃ g.
    // The quotient's derivative by its denominator is −g·numerator / denominator = −q·(S̃ g) / denominator.
    void read_back(int64_t block, float* summary) const {
        float *queries = buffer, *grads = queries + chunk * s.row, *query_grads = grads + chunk * s.columns;
        float *transposed = query_grads + chunk * std::max(s.row, s.columns), *z = transposed + s.columns * s.row;
        float* z_grad = summary + c.dim * s.columns;
        bool add = false;
        transpose(summary, c.dim, s.columns, transposed);
        std::copy(z_grad, z_grad + s.row, z);
        std::fill(z_grad, summary + s.summary, 0.0f);
        chunks(block, [&](int64_t place, int64_t count, const int64_t* tokens) {
            gather_queries(place, count, queries);
            gather(c.out_grad, place, count, c.width, identity, nullptr, grads);
            if (c.normalize)
                for (int64_t t = 0; t < count; ++t) {
                    const float denominator = kept(block, place + t - c.first_place[block]);
                    for (int64_t e = 0; e < s.columns; ++e) grads[t * s.columns + e] /= denominator;
                }
            multiply(query_grads, s.row, {grads, s.columns, 1}, {transposed, s.row, 1}, count, s.row, c.width, false);
            for (int64_t t = 0; t < count; ++t) {
                float *query = queries + t * s.row, *query_grad = query_grads + t * s.row;
                if (c.normalize) {
                    const float denominator = kept(block, place + t - c.first_place[block]);
                    const float downward = -dot(query, query_grad, s.row) / denominator;
                    for (int64_t d = 0; d < c.dim; ++d) query_grad[d] += downward * z[d];
                    for (int64_t d = 0; d < c.dim; ++d) z_grad[d] += downward * query[d];
                }
                if (c.query_grad) write_gradient(query_grad, c.query, tokens[t], c.query_grad);
            }
            multiply(summary, s.columns, {queries, 1, s.row}, {grads, s.columns, 1}, c.dim, s.columns, count, add);
            add = true;
        });
        if (!add) std::fill(summary, z_grad, 0.0f);
    }

    // The gradients of the keys and values of one block, from that of its summary.
    void summarise_back(int64_t block, const float* summary_grad) const {
        float *keys = buffer, *values = keys + chunk * s.row, *grads = values + chunk * s.columns;
        float* transposed = grads + chunk * std::max(s.row, s.columns);
        const float* z_grad = summary_grad + c.dim * s.columns;
        transpose(summary_grad, c.dim, s.columns, transposed);
        chunks(block, [&](int64_t place, int64_t count, const int64_t* tokens) {
            gather_keys(place, count, keys);
            if (c.key_grad) {
                gather_values(place, count, values);
                multiply(grads, s.row, {values, s.columns, 1}, {transposed, s.row, 1}, count, s.row, c.width, false);
                for (int64_t t = 0; t < count; ++t) {
                    float* key_grad = grads + t * s.row;
                    if (c.normalize)
                        for (int64_t d = 0; d < c.dim; ++d) key_grad[d] += z_grad[d];
                    if (mask() && !mask()[tokens[t]]) std::fill(key_grad, key_grad + c.dim, 0.0f);
                    write_gradient(key_grad, c.key, tokens[t], c.key_grad);
                }
            }
            if (c.value_grad) {
                multiply(grads, s.columns, {keys, s.row, 1}, {summary_grad, s.columns, 1}, count, s.columns, c.dim, false);
                for (int64_t t = 0; t < count; ++t)
                    write(grads + t * s.columns, c.width, c.value_grad, in_contiguous(tokens[t], c.width), c.value.dtype);
            }
        });
    }

    // Adds the gradient of a factor: of row i of what it made, times row j of what it was given.
    void factor_gradient(int64_t axis, const float* made, const float* given, int64_t row, int64_t begin, int64_t end) const {
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
};

// Calls `work(worker, task, memory)` for `tasks` tasks of each of some units, spread over the threads, and waits for all.
template <typename Work>
void for_all(const Call& c, const Sizes& s, int64_t first_unit, int64_t units, int64_t tasks, float* memory,
             int64_t memory_of_unit, float* buffers, Work work) {
    const int64_t thread = omp_get_thread_num();
#pragma omp for schedule(static)
    for (int64_t i = 0; i < units * tasks; ++i) {
        const int64_t unit = first_unit + i / tasks;
        const Worker worker{c, s, buffers + thread * s.buffers, thread, unit / c.heads, unit % c.heads};
        work(worker, i % tasks, memory + i / tasks * memory_of_unit);
    }
}

}  // namespace

extern "C" {

int64_t mhla_forward_scratch(const Call* call) {
    const Sizes s(*call, false);
    return s.units * call->blocks * s.summary + call->threads * s.buffers;
}

void mhla_forward(const Call* call) {
    const Call& c = *call;
    const Sizes s(c, false);
    const int64_t memory_of_unit = c.blocks * s.summary, slab_row = s.slab * s.summary;
    float *memory = c.scratch, *buffers = memory + s.units * memory_of_unit;
    const int64_t panels = up(slab_row, panel) / panel;
#pragma omp parallel num_threads(c.threads)
    for (int64_t first = 0; first < c.batch * c.heads; first += s.units) {
        const int64_t units = std::min(s.units, c.batch * c.heads - first);
        auto all = [&](int64_t tasks, auto work) {
            for_all(c, s, first, units, tasks, memory, memory_of_unit, buffers, work);
        };
        all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float* slab = summaries + i * slab_row;
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise(i * s.slab + j, slab + j * s.summary);
            worker.mix_behind(0, slab, slab);
        });
        if (c.num_factors > 1) {  // by columns, the blocks that differ in the first axis only, while they are in the cache
            all(s.slab, [&](const Worker& worker, int64_t i, float* summaries) {
                worker.mix(worker.factor(0), s.slabs, summaries, summaries, slab_row, i * s.summary, (i + 1) * s.summary);
                for (int64_t j = i; j < c.blocks; j += s.slab) worker.read_out(j, summaries + j * s.summary);
            });
            continue;
        }
        all(panels, [&](const Worker& worker, int64_t i, float* summaries) {
            const int64_t begin = i * panel, end = std::min(begin + panel, slab_row);
            worker.mix(worker.factor(0), s.slabs, summaries, summaries, slab_row, begin, end);
        });
        all(c.blocks, [&](const Worker& worker, int64_t block, float* summaries) {
            worker.read_out(block, summaries + block * s.summary);
        });
    }
}

int64_t mhla_backward_scratch(const Call* call) {
    const Sizes s(*call, true);
    return s.units * (2 + (call->num_factors > 1)) * call->blocks * s.summary + call->threads * s.buffers;
}

// Of the forward pass only the denominators are there; the summaries are made anew. What axis a of the mixing was given
// is the summaries mixed along the axes behind it, so that is made once more for each axis.
void mhla_backward(const Call* call) {
    const Call& c = *call;
    const Sizes s(c, true);
    const bool separable = c.num_factors > 1;
    const int64_t of_blocks = c.blocks * s.summary, slab_row = s.slab * s.summary;
    const int64_t memory_of_unit = (2 + separable) * of_blocks;
    float *memory = c.scratch, *buffers = memory + s.units * memory_of_unit;
    const int64_t panels = up(slab_row, panel) / panel, strips = up(slab_row, strip) / strip;
#pragma omp parallel num_threads(c.threads)
    for (int64_t first = 0; first < c.batch * c.heads; first += s.units) {
        const int64_t units = std::min(s.units, c.batch * c.heads - first);
        auto all = [&](int64_t tasks, auto work) {
            for_all(c, s, first, units, tasks, memory, memory_of_unit, buffers, work);
        };
        // What the first axis was given: `given`; it is the summaries themselves where there is one factor only.
        auto grads = [&](float* summaries) { return summaries + of_blocks; };
        auto given = [&](float* summaries) { return summaries + 2 * separable * of_blocks; };
        all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float* slab = summaries + i * slab_row;
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise(i * s.slab + j, slab + j * s.summary);
            worker.mix_behind(0, slab, given(summaries) + i * slab_row);
        });
        all(panels, [&](const Worker& worker, int64_t i, float* summaries) {
            const int64_t begin = i * panel, end = std::min(begin + panel, slab_row);
            worker.mix(worker.factor(0), s.slabs, given(summaries), grads(summaries), slab_row, begin, end);
        });
        all(c.blocks, [&](const Worker& worker, int64_t block, float* summaries) {
            worker.read_back(block, grads(summaries) + block * s.summary);
        });
        all(strips, [&](const Worker& worker, int64_t i, float* summaries) {
            const int64_t begin = i * strip, end = std::min(begin + strip, slab_row);
            worker.factor_gradient(0, grads(summaries), given(summaries), slab_row, begin, end);
            worker.mix(worker.transposed_factor(0), s.slabs, grads(summaries), grads(summaries), slab_row, begin, end);
        });
        all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float *slab = summaries + i * slab_row, *grad = grads(summaries) + i * slab_row;
            for (int64_t axis = 1; axis < c.num_factors; ++axis) {
                const bool is_last = axis + 1 == c.num_factors;
                float* axis_given = is_last ? slab : given(summaries) + i * slab_row;
                worker.mix_behind(axis, slab, axis_given);
                worker.along(axis, [&](int64_t offset, int64_t row) {
                    worker.factor_gradient(axis, grad + offset, axis_given + offset, row, 0, row);
                    worker.mix(worker.transposed_factor(axis), c.counts[axis], grad + offset, grad + offset, row, 0, row);
                });
            }
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise_back(i * s.slab + j, grad + j * s.summary);
        });
    }
}

}  // extern "C"
