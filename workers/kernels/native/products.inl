// The products of several matrices of one kind, each with rows of its own: all rows are packed in one turn of the threads, and all columns are computed in
// another. A product has the bytes that `linear` gives it.

namespace DT_NS {

struct Product {
    const Matrix* matrix;
    const float* x;  // [rows, k], x_stride floats apart
    int64_t x_stride;
    float* y;        // [rows, n]
    int64_t y_stride;
    int64_t rows;    // at most CHUNK
    char* packed;    // of `row_bytes` for each row
};

// Bytes of a row of x that is packed for a matrix.
static inline int64_t row_bytes(const Matrix& m) {
    return m.kind == dovetail::BLOCKS || m.kind == dovetail::EXACT_BLOCKS ? part_x_bytes(m, 1) : 4 * (dovetail::steps_of(m.kind, m.k) + 1);
}

template <int KIND>
static Pass pass_of(const Product& p) {
    const float* scales = (const float*)(p.packed + 4 * p.rows * dovetail::steps_of(KIND, p.matrix->k));
    const char* x = KIND == dovetail::INT8 || p.rows > 1 ? p.packed : (const char*)p.x;
    return {*p.matrix, cut_of<KIND>(*p.matrix, p.rows), x, scales, p.y, p.y_stride};
}

template <int KIND>
static void run_products(const Product* products, int64_t count) {
    take_turns(count, [&](int64_t i) {
        Pass pass = pass_of<KIND>(products[i]);
        prepare<KIND>(pass, products[i].x, products[i].x_stride, products[i].packed, [](auto& pack) { pack(0, 1); });
    });
    in_pieces_of_each(count, dovetail::panels_of(products[0].matrix->n), [&](int64_t i, int64_t from, int64_t to) {  // all are of one shape
        columns<KIND>(pass_of<KIND>(products[i]), from, to);
    });
}

// The parts of the matrices are of the same types; those of plain numbers, which are few, one matrix after the other.
static void run_block_products(const Product* products, int64_t count) {
    take_turns(count, [&](int64_t i) {
        const Product& p = products[i];
        prepare_blocks(*p.matrix, p.x, p.x_stride, p.rows, p.packed, 0, 1);
    });
    in_pieces_of_each(count, dovetail::parts_of(*products[0].matrix).vectors, [&](int64_t i, int64_t from, int64_t to) {  // all are of one shape
        const Product& p = products[i];
        block_columns({*p.matrix, p.rows, p.packed, p.y, p.y_stride}, from, to);
    });
    for (int64_t i = 0; i < count; i++) {
        const Product& p = products[i];
        plain_parts(*p.matrix, p.x, p.x_stride, p.y, p.y_stride, p.rows);
    }
}

// Of codes one product after the other, each by all threads.
static void run_coded_products(const Product* products, int64_t count) {
    for (const Product* p = products; p < products + count; p++) linear(*p->matrix, p->x, p->x_stride, p->y, p->y_stride, p->rows);
}

static void run_products(const Product* products, int64_t count) {
    switch (products[0].matrix->kind) {
        case dovetail::FP32: return run_products<dovetail::FP32>(products, count);
        case dovetail::FP16: return run_products<dovetail::FP16>(products, count);
        case dovetail::BF16: return run_products<dovetail::BF16>(products, count);
        case dovetail::INT8: return run_products<dovetail::INT8>(products, count);
        case dovetail::CODES8:
        case dovetail::CODES4:
        case dovetail::CODES3:
        case dovetail::CODES2: return run_coded_products(products, count);
        default: return run_block_products(products, count);
    }
}

}  // namespace DT_NS
