// What a call reports to Python. C++ exceptions must cross neither `extern "C"` nor the end of a parallel region.

#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>

namespace subquad {

enum Result : int32_t { DONE, OUT_OF_MEMORY, FAILED };  // ops/native_call.py has the same order

// The result of a call that does `work`.
template <class Work>
int32_t result_of(Work work) noexcept {
    try {
        work();
        return DONE;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    } catch (const std::length_error&) {  // a vector larger than memory can be
        return OUT_OF_MEMORY;
    } catch (...) {
        return FAILED;
    }
}

// The first exception of all threads. After it, the call does no more work, but every thread still passes all loops: the others
// would wait for it at their ends.
class FirstError {
   public:
    template <class Work>
    void guard(Work work) noexcept {
        if (has_failed_.load(std::memory_order_relaxed)) return;
        try {
            work();
        } catch (...) {
            if (!has_failed_.exchange(true)) error_ = std::current_exception();
        }
    }

    // After the parallel region.
    void rethrow() const {
        if (error_) std::rethrow_exception(error_);
    }

   private:
    std::atomic<bool> has_failed_{false};
    std::exception_ptr error_;
};

}  // namespace subquad

// The functions of the library: subquad_NAME_float32 and subquad_NAME_float64, which take a call and return a result.
#define EXPORT(name, Call) \
    extern "C" int32_t subquad_##name##_float32(const subquad::Call* call) { \
        return subquad::result_of([call] { subquad::name<float>(*call); }); \
    } \
    extern "C" int32_t subquad_##name##_float64(const subquad::Call* call) { \
        return subquad::result_of([call] { subquad::name<double>(*call); }); \
    }
