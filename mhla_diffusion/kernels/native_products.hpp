// Products of small matrices whose sums stay in registers: for GCC, which makes vectors of eight floats from whatever
// the processor has.

#pragma once

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t lanes = 8;
typedef float vec __attribute__((vector_size(lanes * sizeof(float)), aligned(4), may_alias));

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

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
    vec sums{};
    int64_t i = 0;
    for (; i + lanes <= length; i += lanes) sums += load(a + i) * load(b + i);
    float sum = sum_of(sums);
    for (; i < length; ++i) sum += a[i] * b[i];
    return sum;
}

// A matrix whose element [r, c] lies at data + r * row + c * column.
struct Matrix {
    const float* data;
    int64_t row, column;
};

// Some rows and columns of out (+)= a b.
template <int rows, int vectors>
inline void tile(float* out, int64_t out_row, Matrix a, Matrix b, int64_t terms, bool add) {
    vec sum[rows][vectors] = {};
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
        for (int v = 0; v < vectors; ++v) {
            float* at = out + r * out_row + v * lanes;
            store(at, add ? load(at) + sum[r][v] : sum[r][v]);
        }
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

// to (columns, rows) = from (rows, columns) transposed. Columns are whole vectors, and rows are padded with zeros to
// whole vectors.
void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
    static const float zeros[lanes] = {};
    const int64_t to_row = round_up(rows, lanes);
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

}  // namespace
