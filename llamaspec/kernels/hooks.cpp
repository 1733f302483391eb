// Takes the place of functions that ggml-cpu calls for every matrix product, and computes those with few columns.
//
// ggml-cpu calls its "tiled" functions through the dynamic linker, so those of a library that was loaded before it
// come first. They compute what they can; llama.cpp's own functions get the rest, and all calls of other libraries get
// their own ones. No copy of the weights is made. Nothing here throws: the callers are in C.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "callers.hpp"
#include "kernels.hpp"
#include "memory.hpp"

using namespace llamaspec;

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int VERSION = 3;         // changes with results and costs
constexpr char GGML[] = "0.25.";  // the versions of ggml that have been read and tried

// llama.cpp's functions
void (*barrier)(void *);
void (*chunk_set)(void *, int);
int (*chunk_add)(void *, int);

const Level *level;  // nullptr = compute nothing
std::atomic<const Caller *> attached;  // the library for which we compute; changes only before it evaluates
std::atomic<long long> n_calls, n_missed;  // of its operations, those that were computed, and left to itself

bool is_ours(const Caller &caller) { return &caller == attached.load(std::memory_order_relaxed); }

void count(std::atomic<long long> &n, const ggml_compute_params *params) {
    if (params->ith == 0) n.fetch_add(1, std::memory_order_relaxed);
}

struct TypeSize { int length, bytes; };
constexpr TypeSize size_of(int type) {
    switch (type) {
        case F32: return {1, 4};
        case F16: case BF16: return {1, 2};
        case Q4_0: case IQ4_NL: return {32, 18};
        case Q4_1: return {32, 20};
        case Q5_0: return {32, 22};
        case Q5_1: return {32, 24};
        case Q8_0: return {32, 34};
        case MXFP4: return {32, 17};
        case Q2_K: return {256, 84};
        case Q3_K: return {256, 110};
        case Q4_K: return {256, 144};
        case Q5_K: return {256, 176};
        case Q6_K: return {256, 210};
        case IQ4_XS: return {256, 136};
        default: return {0, 0};
    }
}
bool is_covered(int type) { return level && type >= 0 && type < N_TYPES && level->kernels[type]; }
bool is_float(int type) { return size_of(type).length == 1; }

size_t padded(size_t n) { return (n + 63) / 64 * 64; }

// A matrix of weights.
struct Matrix {
    int type;
    const uint8_t *data;
    size_t row_bytes;  // from one row to the next
    int64_t n_rows, n_inputs;

    size_t bytes_in_row() const { return n_inputs / size_of(type).length * size_of(type).bytes; }
    bool is_small() const { return !is_float(type) && n_rows < level->lanes; }
    size_t quantized_bytes(int64_t n_columns) const {
        return is_float(type) ? 0 : padded(n_inputs / UNIT * n_columns * sizeof(Activations));
    }
    size_t scratch_bytes() const {  // of a thread
        return is_small() ? padded(level->lanes * bytes_in_row()) : 0;
    }
};

Matrix matrix_of(const ggml_tensor *t) {
    return {t->type, static_cast<const uint8_t *>(t->data), t->nb[1], t->ne[1], t->ne[0]};
}

// Multiply rows of a matrix with up to MAX_COLUMNS columns.
void multiply(const Matrix &m, const Activations *quantized, const float *const *columns, int n, float *const *out,
              char *scratch, int64_t first, int64_t end, const uint8_t *next = nullptr) {
    Product product{m.data, m.row_bytes, m.n_rows, m.n_inputs, n, quantized, columns, out, next};
    float rest[MAX_COLUMNS][MAX_LANES], *rows[MAX_COLUMNS];
    if (m.is_small()) {  // repeat the last row
        for (int r = 0; r < level->lanes; r++)
            std::memcpy(scratch + r * m.bytes_in_row(), m.data + std::min<int64_t>(r, m.n_rows - 1) * m.row_bytes,
                        m.bytes_in_row());
        for (int c = 0; c < n; c++) rows[c] = rest[c];
        product.weights = reinterpret_cast<const uint8_t *>(scratch), product.row_bytes = m.bytes_in_row();
        product.n_rows = end = level->lanes, product.out = rows;
    }
    level->kernels[m.type](product, first, end);
    if (m.is_small())
        for (int c = 0; c < n; c++) std::memcpy(out[c], rest[c], m.n_rows * sizeof(float));
}

// Work that threads take in chunks: each first those of its own part, which lie one after the other in memory, then
// what others have left, because their cores may be busy.
struct Chunks {
    struct alignas(64) Next { std::atomic<int64_t> i; };
    static constexpr size_t bytes(int n_threads) { return n_threads * sizeof(Next); }

    Next *next;  // of each thread's part; one thread sets them before the barrier
    int n_threads;

    int64_t begin(int part, int64_t n) const { return n * part / n_threads; }
    void start(int64_t n) const {
        for (int i = 0; i < n_threads; i++) new (next + i) Next{{begin(i, n)}};
    }
    template <class F> void take(int thread, int64_t n, F &&compute) const {
        for (int k = 0; k < n_threads; k++) {
            const int part = (thread + k) % n_threads;
            const int64_t end = begin(part + 1, n);
            for (int64_t i; (i = next[part].i.fetch_add(1, std::memory_order_relaxed)) < end;) compute(i);
        }
    }
};

// Panels of MAX_LANES rows, ascending: all that an evaluation needs of products with so many rows. Other rows are -inf.
struct Panels {
    const int32_t *indices;
    int64_t n, n_rows;

    int64_t begin(int64_t i) const { return int64_t{indices[i]} * MAX_LANES; }
    int64_t end(int64_t i) const { return i < 0 ? 0 : std::min(n_rows, begin(i) + MAX_LANES); }
};
thread_local Panels wanted;  // by the thread that evaluates; n_rows 0 = all rows of all products

// Rows of a chunk: enough chunks that a thread on a busy core leaves its work to others.
int64_t chunk_of(int64_t n_rows, int n_threads) {
    const int64_t n = n_rows / (8 * n_threads);
    return std::max<int64_t>(MAX_LANES, (n + MAX_LANES - 1) / MAX_LANES * MAX_LANES);
}

// What the threads compute of a product. Rows are counted within the panels, if only these are wanted.
struct Plan {
    Panels panels{};
    int64_t n_rows, rows_of_chunk, n_chunks;

    Plan(int64_t n, int n_threads) : n_rows(n) {
        if (n == wanted.n_rows) panels = wanted, n_rows = wanted.n * MAX_LANES;
        rows_of_chunk = chunk_of(n_rows, n_threads), n_chunks = (n_rows + rows_of_chunk - 1) / rows_of_chunk;
    }
};

// Several products of the same shape: those of a tensor's second and third "batch" dimension.
struct Batch {
    Matrix matrix;  // of slice 0
    const ggml_tensor *weights, *x, *dst;
    int64_t n_columns, n_slices;

    explicit Batch(const ggml_tensor *t)
        : matrix(matrix_of(t->src[0])), weights(t->src[0]), x(t->src[1]), dst(t), n_columns(x->ne[1]),
          n_slices(x->ne[2] * x->ne[3]) {}

    const float *column(int64_t slice, int64_t c) const {
        return at<const float>(x, c, slice % x->ne[2], slice / x->ne[2]);
    }
    float *out(int64_t slice, int64_t c) const { return at<float>(dst, c, slice % x->ne[2], slice / x->ne[2]); }
    Matrix slice(int64_t i) const {
        Matrix m = matrix;
        const int64_t i2 = i % x->ne[2] / (x->ne[2] / weights->ne[2]), i3 = i / x->ne[2] / (x->ne[3] / weights->ne[3]);
        m.data += i2 * weights->nb[2] + i3 * weights->nb[3];
        return m;
    }
    size_t quantized_bytes() const { return matrix.quantized_bytes(n_columns * n_slices); }
    size_t work_bytes(int n_threads) const {
        return 64 + padded(sizeof(Plan)) + Chunks::bytes(n_threads) + quantized_bytes() + n_threads * matrix.scratch_bytes();
    }

    // The activations of up to MAX_COLUMNS columns lie together.
    Activations *quantized(char *work, int64_t slice, int64_t c) const {
        return reinterpret_cast<Activations *>(work) + (slice * n_columns + c) * (matrix.n_inputs / UNIT);
    }
    int group(int64_t c) const { return static_cast<int>(std::min<int64_t>(MAX_COLUMNS, n_columns - c)); }

    // Quantize this thread's part of all columns.
    void quantize(char *work, int64_t ith, int64_t nth) const {
        if (is_float(matrix.type)) return;
        const int64_t units = matrix.n_inputs / UNIT, total = units * n_columns * n_slices;
        const int64_t end = total * (ith + 1) / nth;
        for (int64_t i = total * ith / nth; i < end;) {
            const int64_t column = i / units, unit = i % units, n = std::min(units - unit, end - i);
            const int64_t s = column / n_columns, c = column % n_columns, first = c / MAX_COLUMNS * MAX_COLUMNS;
            const size_t stride = group(first);
            level->quantize(this->column(s, c) + unit * UNIT, n, level->aux[matrix.type],
                            quantized(work, s, first) + unit * stride + (c - first), stride);
            i += n;
        }
    }

    void multiply_rows(char *work, char *scratch, int64_t s, int64_t first, int64_t end, int64_t next = -1) const {
        const Matrix m = slice(s);
        const float *columns[MAX_COLUMNS];
        float *outputs[MAX_COLUMNS];
        for (int64_t c = 0; c < n_columns; c += MAX_COLUMNS) {
            const int n = group(c);
            for (int i = 0; i < n; i++) columns[i] = column(s, c + i), outputs[i] = out(s, c + i);
            multiply(m, quantized(work, s, c), columns, n, outputs, scratch, first, end,
                     next < 0 ? nullptr : m.data + next * m.row_bytes);
        }
    }

    // Compute some panels, and leave out the rows before each of them, after the last one of all the rest.
    void multiply_panels(char *work, char *scratch, int64_t s, const Panels &panels, int64_t first, int64_t last) const {
        const int64_t ahead = 1 + BYTES_AHEAD / (MAX_LANES * matrix.row_bytes);
        for (int64_t i = first; i < last; i++) {
            leave_out(s, panels.end(i - 1), panels.begin(i));
            const int64_t next = panels.begin(std::min(i + ahead, panels.n - 1));
            multiply_rows(work, scratch, s, panels.begin(i), panels.end(i), next);
        }
        if (last == panels.n) leave_out(s, panels.end(last - 1), panels.n_rows);
    }
    void leave_out(int64_t s, int64_t first, int64_t end) const {
        for (int64_t c = 0; c < n_columns; c++) std::fill(out(s, c) + first, out(s, c) + end, -INFINITY);
    }

    template <class T> static T *at(const ggml_tensor *t, int64_t i1, int64_t i2, int64_t i3, int64_t i0 = 0) {
        return reinterpret_cast<T *>(static_cast<char *>(t->data) + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2] +
                                     i3 * t->nb[3]);
    }
};

// Whether the kernels can compute this product; anything unusual is llama.cpp's.
bool fits(const ggml_tensor *dst) {
    const ggml_tensor *w = dst->src[0], *x = dst->src[1];
    if (!is_covered(w->type) || x->type != F32 || dst->type != F32) return false;
    const TypeSize size = size_of(w->type);
    const int64_t multiple = is_float(w->type) ? 16 : size.length;
    return w->ne[0] % multiple == 0 && w->nb[0] == static_cast<size_t>(size.bytes) &&
           w->nb[1] >= w->ne[0] / size.length * static_cast<size_t>(size.bytes) && x->nb[0] == sizeof(float) &&
           dst->nb[0] == sizeof(float) && x->nb[1] % sizeof(float) == 0 && x->ne[0] == w->ne[0] && w->ne[1] > 0;
}

bool covers_batches(const ggml_tensor *w, const ggml_tensor *x) {
    return w->ne[2] > 0 && w->ne[3] > 0 && x->ne[2] % w->ne[2] == 0 && x->ne[3] % w->ne[3] == 0;
}

char *aligned(void *p) { return reinterpret_cast<char *>(padded(reinterpret_cast<size_t>(p))); }

// Compute a product; false if it is llama.cpp's.
bool compute_product(const ggml_compute_params *params, const ggml_tensor *dst) {
    if (params->use_ref || !fits(dst) || !covers_batches(dst->src[0], dst->src[1])) return false;
    const Batch batch(dst);
    const int ith = params->ith, nth = params->nth;
    if (params->wsize < batch.work_bytes(nth)) return false;
    char *work = aligned(params->wdata);
    auto *plan = reinterpret_cast<Plan *>(work);  // only the first thread knows what is wanted
    const Chunks chunks{reinterpret_cast<Chunks::Next *>(work + padded(sizeof(Plan))), nth};
    if (ith == 0) {
        new (plan) Plan(batch.matrix.n_rows, nth);
        chunks.start(plan->n_chunks * batch.n_slices);
    }
    work += padded(sizeof(Plan)) + Chunks::bytes(nth);
    char *scratch = work + batch.quantized_bytes() + ith * batch.matrix.scratch_bytes();
    batch.quantize(work, ith, nth);
    count(n_calls, params);
    barrier(params->threadpool);
    const int64_t n_chunks = plan->n_chunks, n = plan->rows_of_chunk;
    chunks.take(ith, n_chunks * batch.n_slices, [&](int64_t i) {
        const int64_t first = i % n_chunks * n, end = std::min(plan->n_rows, first + n);
        if (!plan->panels.n) return batch.multiply_rows(work, scratch, i / n_chunks, first, end);
        batch.multiply_panels(work, scratch, i / n_chunks, plan->panels, first / MAX_LANES, end / MAX_LANES);
    });
    return true;
}

// Products of a mixture of experts: each column of `dst` is multiplied with the expert that it chose.
struct Experts {
    // Columns of one expert that are multiplied together.
    struct Group { int32_t expert, first, n; };
    // What the threads compute. Each chunk has rows of one group.
    struct Plan { int64_t n_groups, rows_of_chunk, chunks_of_group; };

    Batch batch;
    const ggml_tensor *ids;
    const int32_t *rows;  // of each expert, pairs (index of the expert in a token's list, token), as llama.cpp lists them

    explicit Experts(const ggml_tensor *dst, const int32_t *rows = nullptr) : batch(dst), ids(dst->src[2]), rows(rows) {}

    const Matrix &matrix() const { return batch.matrix; }
    int64_t n_experts() const { return batch.weights->ne[2]; }
    int64_t n_choices() const { return ids->ne[0] * ids->ne[1]; }
    int32_t choice(int64_t i) const { return *Batch::at<const int32_t>(ids, i / ids->ne[0], 0, 0, i % ids->ne[0]); }
    size_t plan_bytes(int n_threads) const {
        const int64_t n_groups = std::min(n_experts(), n_choices()) + n_choices() / MAX_COLUMNS;
        return padded(sizeof(Plan)) + Chunks::bytes(n_threads) + padded(n_groups * sizeof(Group)) +
               padded(n_experts() * sizeof(int32_t));
    }
    size_t thread_bytes() const { return matrix().quantized_bytes(MAX_COLUMNS) + matrix().scratch_bytes(); }
    size_t work_bytes(int n_threads) const {
        return plan_bytes(n_threads) + batch.quantized_bytes() + n_threads * thread_bytes();
    }

    // llama.cpp calls for each expert that was chosen, in ascending order. The first call computes all of them.
    bool is_first(int64_t expert) const {
        for (int64_t i = 0; i < n_choices(); i++)
            if (choice(i) < expert) return false;
        return true;
    }

    void make_plan(Plan &plan, const Chunks &chunks, Group *groups, int32_t *counts) const {
        std::fill_n(counts, n_experts(), 0);
        for (int64_t i = 0; i < n_choices(); i++) counts[choice(i)]++;
        plan.n_groups = 0;
        for (int32_t e = 0; e < n_experts(); e++)
            for (int32_t first = 0; first < counts[e]; first += MAX_COLUMNS)
                groups[plan.n_groups++] = {e, first, std::min(MAX_COLUMNS, counts[e] - first)};
        const int64_t n = matrix().n_rows;
        plan.rows_of_chunk = chunk_of(n * plan.n_groups, chunks.n_threads);
        plan.chunks_of_group = (n + plan.rows_of_chunk - 1) / plan.rows_of_chunk;
        chunks.start(plan.n_groups * plan.chunks_of_group);
    }

    const int32_t *row(const Group &g, int i) const { return rows + 2 * (g.expert * n_choices() + g.first + i); }

    // Copy the activations of a group to where they lie together.
    void gather(char *work, const Group &g, Activations *out) const {
        if (is_float(matrix().type)) return;
        const int64_t units = matrix().n_inputs / UNIT;
        for (int i = 0; i < g.n; i++) {
            const int64_t c = row(g, i)[0] % batch.n_columns, first = c / MAX_COLUMNS * MAX_COLUMNS;
            const Activations *from = batch.quantized(work, row(g, i)[1], first) + (c - first);
            for (int64_t u = 0, stride = batch.group(first); u < units; u++) out[u * g.n + i] = from[u * stride];
        }
    }

    void multiply_rows(const Group &g, const Activations *quantized, char *scratch, int64_t first, int64_t end) const {
        Matrix m = matrix();
        m.data += g.expert * batch.weights->nb[2];
        const float *columns[MAX_COLUMNS];
        float *out[MAX_COLUMNS];
        for (int i = 0; i < g.n; i++) {
            const int64_t i1 = row(g, i)[0], i2 = row(g, i)[1];
            columns[i] = batch.column(i2, i1 % batch.n_columns), out[i] = batch.out(i2, i1);
        }
        multiply(m, quantized, columns, g.n, out, scratch, first, end);
    }
};

// Compute the products of all experts in the call for the first one; false if they are llama.cpp's.
bool compute_experts(const ggml_compute_params *params, const ggml_tensor *dst, int64_t expert, const int32_t *rows,
                     char *work) {
    if (params->use_ref || !fits(dst)) return false;
    const int64_t n_choices = dst->src[2]->ne[0] * dst->src[2]->ne[1];
    const Experts experts(dst, rows - 2 * expert * n_choices);
    const int ith = params->ith, nth = params->nth;
    const char *end_of_work = static_cast<char *>(params->wdata) + params->wsize;
    if (end_of_work - work < static_cast<ptrdiff_t>(experts.work_bytes(nth))) return false;
    if (!experts.is_first(expert)) return true;
    auto *plan = reinterpret_cast<Experts::Plan *>(work);
    const Chunks chunks{reinterpret_cast<Chunks::Next *>(work + padded(sizeof *plan)), nth};
    auto *groups = reinterpret_cast<Experts::Group *>(chunks.next + nth);
    if (ith == 0) {
        char *counts = work + experts.plan_bytes(nth) - padded(experts.n_experts() * sizeof(int32_t));
        experts.make_plan(*plan, chunks, groups, reinterpret_cast<int32_t *>(counts));
    }
    work += experts.plan_bytes(nth);
    experts.batch.quantize(work, ith, nth);
    count(n_calls, params);
    barrier(params->threadpool);
    char *own = work + experts.batch.quantized_bytes() + ith * experts.thread_bytes();
    auto *gathered = reinterpret_cast<Activations *>(own);
    int64_t latest = -1, n = plan->rows_of_chunk;  // the group whose activations were gathered
    chunks.take(ith, plan->n_groups * plan->chunks_of_group, [&](int64_t i) {
        const int64_t group = i / plan->chunks_of_group, first = i % plan->chunks_of_group * n;
        if (group != latest) experts.gather(work, groups[group], gathered), latest = group;
        experts.multiply_rows(groups[group], gathered, own + experts.matrix().quantized_bytes(MAX_COLUMNS), first,
                              std::min(experts.matrix().n_rows, first + n));
    });
    return true;
}

constexpr int ROWS_OF_ATTENTION = 24;  // that read keys and values together
constexpr int MAX_HEADS = 1024;

bool fits_cells(const ggml_tensor *t) {  // keys or values
    const bool is_whole = t->ne[0] % (t->type == Q8_0 ? 32 : 16) == 0;
    return (t->type == F16 || t->type == BF16 || t->type == Q8_0) && t->nb[0] == static_cast<size_t>(size_of(t->type).bytes) && is_whole;
}

bool fits_attention(const ggml_tensor *dst) {
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *mask = dst->src[3];
    return q->ne[2] <= MAX_HEADS && q->type == F32 && fits_cells(k) && fits_cells(v) && q->nb[0] == 4 &&
           dst->type == F32 && dst->nb[0] == 4 && dst->nb[1] == 4 * static_cast<size_t>(v->ne[0]) && q->ne[3] == 1 &&
           k->ne[3] == 1 && v->ne[3] == 1 && k->ne[2] == v->ne[2] && k->ne[1] == v->ne[1] && q->ne[2] % k->ne[2] == 0 &&
           q->ne[0] == k->ne[0] && k->ne[1] < INT32_MAX && (!mask || (mask->type == F16 && mask->ne[2] == 1 && mask->ne[3] == 1));
}

// Of the thread that evaluates, for all threads of an attention. It grows with the context.
thread_local Memory attention_memory;

// Items of an attention: some heads that share keys and values, at some positions.
struct Items {
    int n_kv, heads_per_kv, n, heads, positions;

    Items(const Attention &a, int n, int n_threads) : n_kv(a.n_heads / a.heads_per_kv), heads_per_kv(a.heads_per_kv), n(n) {
        heads = std::min(heads_per_kv, ROWS_OF_ATTENTION), positions = std::min(n, ROWS_OF_ATTENTION / heads);
        while (heads > 1 && count() < n_threads) heads = (heads + 1) / 2;
    }
    int groups() const { return (heads_per_kv + heads - 1) / heads; }
    int count() const { return n_kv * groups() * ((n + positions - 1) / positions); }
    size_t scratch_bytes(const Attention &a) const { return padded(a.scratch_bytes(heads, positions)); }  // of a thread
    void compute(const Attention &a, int i, char *scratch) const {
        const int group = i % groups(), kv = i / groups() % n_kv, position = i / (groups() * n_kv) * positions;
        level->attend(a, kv * heads_per_kv + group * heads, std::min(heads, heads_per_kv - group * heads), position,
                      std::min(positions, n - position), scratch);
    }
};

// Compute an attention; false if it is llama.cpp's, or there is no memory.
bool compute_attention(const ggml_compute_params *params, const ggml_tensor *dst) {
    char *memory;
    if (params->use_ref || !level || !fits_attention(dst) || params->wsize < sizeof memory) return false;
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *mask = dst->src[3], *sinks = dst->src[4];
    float numbers[3];  // scale, greatest bias, softcap
    std::memcpy(numbers, dst->op_params, sizeof numbers);
    const int n_heads = static_cast<int>(q->ne[2]);
    Attention a{};
    a.n_heads = n_heads, a.heads_per_kv = n_heads / static_cast<int>(k->ne[2]);
    a.key_length = static_cast<int>(k->ne[0]), a.value_length = static_cast<int>(v->ne[0]), a.n_cells = k->ne[1];
    a.q = static_cast<const char *>(q->data), a.q_position_bytes = q->nb[1], a.q_head_bytes = q->nb[2];
    a.keys = static_cast<const uint8_t *>(k->data), a.key_cell_bytes = k->nb[1], a.key_head_bytes = k->nb[2];
    a.values = static_cast<const uint8_t *>(v->data), a.value_cell_bytes = v->nb[1], a.value_head_bytes = v->nb[2];
    a.key_type = k->type, a.value_type = v->type;
    a.mask = mask ? static_cast<const char *>(mask->data) : nullptr, a.mask_bytes = mask ? mask->nb[1] : 0;
    a.sinks = sinks ? static_cast<const float *>(sinks->data) : nullptr;
    a.softcap = numbers[2], a.scale = numbers[2] != 0.0f ? numbers[0] / numbers[2] : numbers[0];
    a.out = static_cast<float *>(dst->data);
    float slopes[MAX_HEADS];
    if (numbers[1] > 0.0f) {  // ALiBi
        const int power = 1 << static_cast<int>(std::floor(std::log2(n_heads)));
        const float m0 = std::pow(2.0f, -numbers[1] / power), m1 = std::pow(2.0f, -numbers[1] / 2.0f / power);
        for (int h = 0; h < n_heads; h++)
            slopes[h] = std::pow(h < power ? m0 : m1, static_cast<float>(h < power ? h + 1 : 2 * (h - power) + 1));
        a.slopes = slopes;
    }
    const Items items(a, static_cast<int>(q->ne[1]), params->nth);
    if (params->ith == 0) {  // the others learn the address from llama.cpp's work memory
        memory = attention_memory.reserve(params->nth * items.scratch_bytes(a));
        std::memcpy(params->wdata, &memory, sizeof memory);
        chunk_set(params->threadpool, params->nth);
    }
    barrier(params->threadpool);
    std::memcpy(&memory, params->wdata, sizeof memory);
    if (!memory) {
        barrier(params->threadpool);  // llama.cpp's attention writes to the work memory
        return false;
    }
    count(n_calls, params);
    char *scratch = memory + params->ith * items.scratch_bytes(a);
    for (int i = params->ith; i < items.count(); i = chunk_add(params->threadpool, 1)) items.compute(a, i, scratch);
    return true;
}

}  // namespace

EXPORTED bool ggml_compute_forward_mul_mat_tiled(const ggml_compute_params *params, ggml_tensor *dst, Word c, Word d,
                                                 Word e, Word f) {
    const Caller &caller = caller_at(__builtin_return_address(0));
    if (is_ours(caller)) {
        if (compute_product(params, dst)) return true;
        count(n_missed, params);
    }
    return caller.mul_mat_tiled && caller.mul_mat_tiled(params, dst, c, d, e, f);
}

EXPORTED bool ggml_compute_forward_mul_mat_id_tiled(const ggml_compute_params *params, ggml_tensor *dst, int64_t expert,
                                                    int64_t n, const int32_t *rows, char *scratch) {
    const Caller &caller = caller_at(__builtin_return_address(0));
    if (is_ours(caller)) {
        if (compute_experts(params, dst, expert, rows, scratch)) return true;
        count(n_missed, params);
    }
    return caller.mul_mat_id_tiled && caller.mul_mat_id_tiled(params, dst, expert, n, rows, scratch);
}

// llama.cpp asks this for the size of wdata; what it needs for itself comes first.
EXPORTED size_t ggml_tiled_wdata_size(Word threads, const ggml_tensor *dst, Word c, Word d, Word e, Word f) {
    const Caller &caller = caller_at(__builtin_return_address(0));
    size_t n = caller.tiled_wdata_size ? caller.tiled_wdata_size(threads, dst, c, d, e, f) : 0;
    if (is_ours(caller) && fits(dst)) {
        const int n_threads = static_cast<int>(threads);
        if (dst->src[2]) n = std::max(n, Experts(dst).work_bytes(n_threads));
        else if (covers_batches(dst->src[0], dst->src[1])) n = std::max(n, Batch(dst).work_bytes(n_threads));
    }
    return n;
}

EXPORTED void ggml_compute_forward_flash_attn_ext(const ggml_compute_params *params, ggml_tensor *dst, Word c, Word d,
                                                  Word e, Word f) {
    const Caller &caller = caller_at(__builtin_return_address(0));
    if (is_ours(caller)) {
        if (compute_attention(params, dst)) return;
        count(n_missed, params);
    }
    if (!caller.flash_attention) std::abort();  // it could not have been loaded without us
    caller.flash_attention(params, dst, c, d, e, f);
}

namespace {

template <class F> bool find(void *library, const char *name, F *&function) {
    function = reinterpret_cast<F *>(dlsym(library, name));
    return function != nullptr;
}

bool set_level(const char *name) {
    const Level *found = nullptr;
    for (const Choice *each = choices; each->level; each++)
        if (!std::strcmp(each->level->name, name) && each->is_here()) found = each->level;
    if (found || !*name) level = found;
    return found || !*name;
}

bool choose_level() {
    for (const Choice *each = choices; each->level && !level; each++)
        if (each->is_here()) level = each->level;
    return level;
}

// Multiply through ggml as llama.cpp does, and compare with the right numbers; return what is wrong, if anything.
const char *self_test(void *cpu, void *base) {
    void *(*init)(ggml_init_params);
    void (*free_context)(void *);
    ggml_tensor *(*new_3d)(void *, int, int64_t, int64_t, int64_t);
    ggml_tensor *(*mul_mat)(void *, ggml_tensor *, ggml_tensor *);
    ggml_tensor *(*mul_mat_id)(void *, ggml_tensor *, ggml_tensor *, ggml_tensor *);
    void *(*new_graph)(void *, size_t, bool);
    void (*expand)(void *, ggml_tensor *);
    int (*compute)(void *, void *, int);
    if (!find(base, "ggml_init", init) || !find(base, "ggml_free", free_context) ||
        !find(base, "ggml_new_tensor_3d", new_3d) || !find(base, "ggml_mul_mat", mul_mat) ||
        !find(base, "ggml_mul_mat_id", mul_mat_id) || !find(base, "ggml_new_graph_custom", new_graph) ||
        !find(base, "ggml_build_forward_expand", expand) || !find(cpu, "ggml_graph_compute_with_ctx", compute))
        return "llama.cpp lacks functions for the self-test";
    constexpr int K = 64, ROWS = 40, COLUMNS = 3, EXPERTS = 4, USED = 2;
    alignas(64) static char memory[1 << 18];
    void *context = init({sizeof memory, memory, false});
    ggml_tensor *w = new_3d(context, Q8_0, K, ROWS, EXPERTS), *first = new_3d(context, Q8_0, K, ROWS, 1);
    ggml_tensor *x = new_3d(context, F32, K, COLUMNS, 1);
    ggml_tensor *each = new_3d(context, F32, K, 1, COLUMNS), *ids = new_3d(context, 26, USED, COLUMNS, 1);  // I32
    if (w->ne[0] != K || w->ne[1] != ROWS || w->ne[2] != EXPERTS || w->nb[1] != K / 32 * 34 || w->type != Q8_0 || !w->data) {
        free_context(context);
        return "llama.cpp's tensors have another layout";
    }
    for (int r = 0; r < ROWS * EXPERTS; r++)
        for (int b = 0; b < K / 32; b++) {
            uint8_t *block = static_cast<uint8_t *>(w->data) + r * w->nb[1] + 34 * b;
            const uint16_t one = 0x3c00;
            std::memcpy(block, &one, 2);
            for (int i = 0; i < 32; i++) block[2 + i] = static_cast<uint8_t>((7 * r + 5 * b + 3 * i) % 11 - 5);
        }
    auto weight = [&](int r, int k) { return (7 * r + 5 * (k / 32) + 3 * (k % 32)) % 11 - 5; };
    auto input = [&](int c, int k) { return k % 32 == c ? 127 : (k + 2 * c) % 5 - 2; };  // integers stay what they are
    for (int c = 0; c < COLUMNS; c++)
        for (int k = 0; k < K; k++)
            static_cast<float *>(x->data)[c * K + k] = static_cast<float *>(each->data)[c * K + k] =
                static_cast<float>(input(c, k));
    for (int i = 0; i < USED * COLUMNS; i++) static_cast<int32_t *>(ids->data)[i] = (2 * i + 1) % EXPERTS;
    first->data = w->data;
    ggml_tensor *dense = mul_mat(context, first, x), *chosen = mul_mat_id(context, w, each, ids);
    void *graph = new_graph(context, 8, false);
    expand(graph, dense), expand(graph, chosen);
    const long long before = n_calls;
    const int status = compute(context, graph, 1);
    const char *reason = nullptr;
    if (status) reason = "llama.cpp cannot evaluate the self-test";
    else if (n_calls < before + 2) reason = "llama.cpp does not call the kernels (it was loaded before them, or is a static library)";
    else
        for (int c = 0; c < COLUMNS; c++)
            for (int r = 0; r < ROWS; r++) {
                int right = 0;
                for (int k = 0; k < K; k++) right += weight(r, k) * input(c, k);
                bool same = std::fabs(static_cast<float *>(dense->data)[c * ROWS + r] - right) < 1e-2f;
                for (int u = 0; u < USED; u++) {
                    const int e = (2 * (c * USED + u) + 1) % EXPERTS;
                    right = 0;
                    for (int k = 0; k < K; k++) right += weight(e * ROWS + r, k) * input(c, k);
                    same &= std::fabs(static_cast<float *>(chosen->data)[(c * USED + u) * ROWS + r] - right) < 1e-2f;
                }
                if (!same) reason = "the self-test found wrong numbers";
            }
    free_context(context);
    return reason;
}

}  // namespace

EXPORTED int llamaspec_kernels_version() { return VERSION; }
EXPORTED const char *llamaspec_kernels_level() { return level ? level->name : ""; }
EXPORTED int llamaspec_kernels_covers(int type) { return is_covered(type); }
EXPORTED long long llamaspec_kernels_calls() { return n_calls; }
EXPORTED long long llamaspec_kernels_missed() { return n_missed; }

// Of products with n_rows rows, compute only n > 0 panels for this thread from now on, and -inf for other rows; 0 rows: all.
EXPORTED void llamaspec_kernels_want(const int32_t *panels, int64_t n, int64_t n_rows) { wanted = {panels, n, n_rows}; }

// Choose an instruction set by name, or "" to compute nothing, while nothing is evaluated; returns 0 if this processor
// lacks it.
EXPORTED int llamaspec_kernels_set_level(const char *name) { return set_level(name); }

// Compute from now on for the loaded library ggml-cpu, given by its handle and that of ggml-base, if the kernels suit it
// and pass a test; returns NULL, or why not. Nothing may be evaluated meanwhile.
EXPORTED const char *llamaspec_kernels_attach(void *cpu, void *base) {
    static char reason[128];
    const char *(*version)();
    size_t (*overhead)();
    if (!choose_level()) return too_old;
    if (!find(base, "ggml_version", version) || !find(base, "ggml_tensor_overhead", overhead))
        return "this llama.cpp is too old";
    if (std::strncmp(version(), GGML, sizeof GGML - 1)) {
        std::snprintf(reason, sizeof reason, "they were written for ggml %sx, and this is %.40s", GGML, version());
        return reason;
    }
    if (overhead() != GGML_OBJECT_BYTES + sizeof(ggml_tensor)) return "llama.cpp's tensors have another size";
    const Caller &caller = caller_at(dlsym(cpu, "ggml_compute_forward_mul_mat_tiled"));
    if (!caller.has_all() || !find(cpu, "ggml_threadpool_chunk_set", chunk_set) ||
        !find(cpu, "ggml_threadpool_chunk_add", chunk_add) || !find(cpu, "ggml_barrier", barrier))
        return "llama.cpp lacks functions that they take over";
    attached = &caller;
    const char *fault = self_test(cpu, base);
    if (fault) attached = nullptr;
    return fault;
}

// Bytes of memory that attention takes for each cell on so many threads; `heads` of a model share keys and values.
EXPORTED size_t llamaspec_kernels_bytes_per_cell(int heads, int n_threads) {
    Attention a{};
    a.n_heads = a.heads_per_kv = heads, a.n_cells = 1 << 20;
    const Items items(a, ROWS_OF_ATTENTION * n_threads, n_threads);
    return with_reserve(n_threads * items.scratch_bytes(a)) / a.n_cells + 1;
}

// For tests: out[c * n_rows + r], computed in chunks of rows in the given order, with the current instruction set.
// `quantized` receives the activations, [n_inputs / 32, columns] in groups of MAX_COLUMNS. Returns 0 if the type is
// not covered, or there is no memory.
EXPORTED int llamaspec_kernels_multiply(int type, const void *weights, size_t row_bytes, int64_t n_rows, int64_t n_inputs,
                                        const float *x, int64_t n_columns, float *out, int n_threads, int64_t chunk_rows,
                                        void *quantized) {
    if (!choose_level() || !is_covered(type)) return 0;
    ggml_tensor w{}, a{}, dst{};
    w.type = type, w.data = const_cast<void *>(weights), w.nb[0] = size_of(type).bytes, w.nb[1] = row_bytes;
    w.ne[0] = n_inputs, w.ne[1] = n_rows, w.ne[2] = w.ne[3] = 1;
    a.data = const_cast<float *>(x), a.ne[0] = n_inputs, a.ne[1] = n_columns, a.ne[2] = a.ne[3] = 1;
    a.nb[0] = 4, a.nb[1] = 4 * n_inputs;
    dst.data = out, dst.nb[0] = 4, dst.nb[1] = 4 * n_rows, dst.src[0] = &w, dst.src[1] = &a;
    if (!fits(&dst)) return 0;
    const Batch batch(&dst);
    const std::unique_ptr<char[]> memory(new (std::nothrow) char[batch.work_bytes(n_threads)]);
    if (!memory) return 0;
    char *work = aligned(memory.get());
    for (int i = n_threads - 1; i >= 0; i--) batch.quantize(work, i, n_threads);
    for (int64_t first = 0; first < n_rows; first += chunk_rows)
        batch.multiply_rows(work, work + batch.quantized_bytes(), 0, first, std::min(n_rows, first + chunk_rows));
    if (quantized && !is_float(type)) std::memcpy(quantized, work, n_inputs / UNIT * n_columns * sizeof(Activations));
    return 1;
}

// For tests: attention over f16, bf16 or q8_0 keys [n_cells, n_kv, key_length] and values, with q [n, n_heads, key_length] and
// mask [n, n_cells]. Returns 0 if there is no memory.
EXPORTED int llamaspec_kernels_attend(int type_k, int type_v, const float *q, const void *k, const void *v,
                                      const void *mask, const float *sinks, const float *slopes, float scale,
                                      float softcap, int n, int n_heads, int n_kv, int key_length, int value_length,
                                      int64_t n_cells, int n_threads, float *out) {
    if (!choose_level()) return 0;
    Attention a{};
    const size_t kl = key_length, vl = value_length;
    a.n_heads = n_heads, a.heads_per_kv = n_heads / n_kv, a.key_length = key_length, a.value_length = value_length;
    a.n_cells = n_cells, a.q = reinterpret_cast<const char *>(q), a.q_position_bytes = 4 * n_heads * kl;
    a.q_head_bytes = 4 * kl, a.keys = static_cast<const uint8_t *>(k), a.values = static_cast<const uint8_t *>(v);
    const TypeSize key = size_of(type_k), value = size_of(type_v);
    a.key_head_bytes = kl / key.length * key.bytes, a.value_head_bytes = vl / value.length * value.bytes;
    a.key_cell_bytes = n_kv * a.key_head_bytes, a.value_cell_bytes = n_kv * a.value_head_bytes;
    a.key_type = type_k, a.value_type = type_v;
    a.mask = static_cast<const char *>(mask), a.mask_bytes = 2 * n_cells, a.sinks = sinks, a.slopes = slopes;
    a.scale = scale, a.softcap = softcap, a.out = out;
    const Items items(a, n, n_threads);
    const std::unique_ptr<char[]> memory(new (std::nothrow) char[items.scratch_bytes(a) + 64]);
    if (!memory) return 0;
    for (int i = 0; i < items.count(); i++) items.compute(a, i, aligned(memory.get()));
    return 1;
}
