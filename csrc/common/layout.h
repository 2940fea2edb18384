// The layouts of structures that Python mirrors. native_library.py compares them when it loads the library.

#pragma once

#include <cstddef>
#include <cstdint>

namespace subquad {

struct Field {
    const char* name;  // null: the end, where `offset` is the size of the structure
    int64_t offset, size;
};

}  // namespace subquad

// FIELDS(S, a, b, ...) lists the fields of S: each EXPAND scans its argument four times, which is enough for 64 fields.
#define LAYOUT_PARENTHESES ()
#define LAYOUT_EXPAND(...) LAYOUT_EXPAND3(LAYOUT_EXPAND3(LAYOUT_EXPAND3(LAYOUT_EXPAND3(__VA_ARGS__))))
#define LAYOUT_EXPAND3(...) LAYOUT_EXPAND2(LAYOUT_EXPAND2(LAYOUT_EXPAND2(LAYOUT_EXPAND2(__VA_ARGS__))))
#define LAYOUT_EXPAND2(...) LAYOUT_EXPAND1(LAYOUT_EXPAND1(LAYOUT_EXPAND1(LAYOUT_EXPAND1(__VA_ARGS__))))
#define LAYOUT_EXPAND1(...) __VA_ARGS__
#define LAYOUT_FIELDS(Struct, ...) __VA_OPT__(LAYOUT_EXPAND(LAYOUT_FIELD(Struct, __VA_ARGS__)))
#define LAYOUT_FIELD(Struct, field, ...) \
    {#field, offsetof(Struct, field), sizeof(Struct::field)}, __VA_OPT__(LAYOUT_FIELD_AGAIN LAYOUT_PARENTHESES(Struct, __VA_ARGS__))
#define LAYOUT_FIELD_AGAIN() LAYOUT_FIELD

// Exports the layout of subquad::NAME as subquad_layout_NAME. All fields, in their order.
#define LAYOUT(Name, ...) \
    extern "C" const subquad::Field* subquad_layout_##Name() { \
        using namespace subquad; \
        static const Field fields[] = {LAYOUT_FIELDS(Name, __VA_ARGS__){nullptr, sizeof(Name), 0}}; \
        return fields; \
    }
