// The order in which the rows of a tree are walked by a state: depth first.
//
// A child's state is written where its parent's was if that is not needed any more, which it is not for the child with the most rows below it, who comes last: so
// there are as many blocks at a time as the logarithm of the rows.

namespace DT_NS {

constexpr int SESSION = -1;  // the state of the session, in place of a block of a desk

struct Hop {
    int32_t slot, row;  // row -1: its factors are there from a pass before
    int32_t from, to;   // blocks of the desk, or SESSION
};

// How the rows of a segment are walked in one layer.
struct Walk {
    Hop* hops;
    int64_t count, blocks;
    bool in_place;  // all rows are committed: the state takes them in
};

struct Node {
    int32_t parent, child, sibling, weight;
};

// Nodes are slots from `base` on, of which `near` stand before those that are lent; a node's last child in the list is its heaviest.
struct Tree {
    Node* nodes;
    int32_t* order;
    int64_t count, base, near, lent_first;
    int32_t roots;

    int32_t node_of(int64_t slot) const { return (int32_t)(slot < lent_first ? slot - base : near + slot - lent_first); }
    int64_t slot_of(int32_t node) const { return node < near ? base + node : lent_first + node - near; }

    void add(int32_t node, int32_t parent) {
        if (nodes[node].weight) return;
        nodes[node] = {parent, -1, -1, 1};
        order[count++] = node;
    }
    void link() {
        for (int64_t i = count - 1; i > 0; i--)
            if (nodes[order[i]].parent >= 0) nodes[nodes[order[i]].parent].weight += nodes[order[i]].weight;
        roots = -1;
        for (int64_t i = count - 1; i >= 0; i--) {
            const int32_t node = order[i], parent = nodes[node].parent;
            int32_t& first = parent < 0 ? roots : nodes[parent].child;
            if (first >= 0 && nodes[node].weight <= nodes[first].weight) {
                nodes[node].sibling = nodes[first].sibling;  // the heaviest is the first
                nodes[first].sibling = node;
            } else {
                nodes[node].sibling = first;
                first = node;
            }
        }
    }
};

static void grow(Tree& tree, const dovetail::Segment& s) {
    for (int64_t i = 0; i < s.count; i++) {
        const int64_t prefix = s.path_offsets ? s.prefix : s.start + i + 1;
        int32_t parent = -1;
        if (!s.path_offsets && i > 0) {
            tree.add(tree.node_of(s.start + i), tree.node_of(s.start + i) - 1);
            continue;
        }
        for (int64_t slot = tree.base; slot < prefix; slot++) {
            tree.add(tree.node_of(slot), parent);
            parent = tree.node_of(slot);
        }
        if (!s.path_offsets) continue;
        for (int32_t p = s.path_offsets[i]; p < s.path_offsets[i + 1]; p++) {
            tree.add(tree.node_of(s.path_slots[p]), parent);
            parent = tree.node_of(s.path_slots[p]);
        }
    }
}

struct Visit {
    int32_t node, from, to;
};

// The children of a node, or the roots: the heaviest is put on the stack first, and comes last.
static inline Visit* visit_children(const Tree& tree, int32_t first, int32_t from, int32_t light, int32_t heavy, Visit* stack) {
    for (int32_t node = first; node >= 0; node = tree.nodes[node].sibling) *stack++ = {node, from, node == first ? heavy : light};
    return stack;
}

static inline int32_t row_at(const dovetail::Segment& s, int64_t slot) { return slot < s.start ? -1 : (int32_t)(s.first_row + slot - s.start); }

static void walk_tree(const Tree& tree, const dovetail::Segment& s, Visit* stack, Walk& walk) {
    Visit* const bottom = stack;
    stack = visit_children(tree, tree.roots, SESSION, 0, 0, stack);
    while (stack != bottom) {
        const Visit v = *--stack;
        const int64_t slot = tree.slot_of(v.node);
        walk.hops[walk.count++] = {(int32_t)slot, row_at(s, slot), v.from, v.to};
        walk.blocks = larger(walk.blocks, v.to + 1);
        stack = visit_children(tree, tree.nodes[v.node].child, v.to, v.to + 1, v.to, stack);
    }
}

static int64_t walk_bytes(int64_t slots) { return round_up(slots * (int64_t)(sizeof(Hop) + sizeof(Node) + sizeof(int32_t) + sizeof(Visit)), 64); }

// The slots that a walk may pass: those behind `folded` to the last row, without those between a session's own and the lent ones.
static int64_t slots_behind(const dovetail::Segment& s, int64_t folded) {
    const int64_t stop = s.start + s.count;
    return s.states->lent ? s.prefix - folded + stop - s.states->lent_first : stop - folded;
}

// `memory`: walk_bytes(slots_behind(s, folded)).
static Walk walk_of(const dovetail::Segment& s, int64_t folded, char* memory) {
    const int64_t stop = s.start + s.count, slots = slots_behind(s, folded), fold = larger(folded, s.states->fold);
    Walk walk = {(Hop*)memory, 0, 0, fold == stop};
    for (int64_t slot = folded; slot < fold; slot++) walk.hops[walk.count++] = {(int32_t)slot, row_at(s, slot), SESSION, SESSION};
    if (walk.in_place) return walk;
    const bool lends = s.states->lent;
    Tree tree = {(Node*)(walk.hops + slots), nullptr, 0, fold, lends ? s.prefix - fold : INT64_MAX, lends ? s.states->lent_first : INT64_MAX, -1};
    tree.order = (int32_t*)(tree.nodes + slots);
    memset(tree.nodes, 0, (size_t)slots * sizeof(Node));
    grow(tree, s);
    tree.link();
    walk_tree(tree, s, (Visit*)(tree.order + slots), walk);
    return walk;
}

}  // namespace DT_NS
