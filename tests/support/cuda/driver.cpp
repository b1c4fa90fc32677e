// NVIDIA's driver for tests, as far as workers/devices/nvidia/driver.py calls it: "machine code" is ignored, since the functions are those of the source
// that is compiled beside it, and a launch runs them at once. It refuses a launch without a context, and counts what is pushed and not popped.
#include <dlfcn.h>

static int pushed = 0, pushes = 0, refusing = 0, early = 0;
static int64_t last_stream = -1;

// The driver knows from the machine code how many arguments a function takes.
static int count_of(const char* name) {
    return strcmp(name, "round_rows") == 0 ? 4 : strncmp(name, "round_", 6) == 0 ? 6 : 9;
}

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int index) {
    *device = index;
    return index == 0 ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
    *context = (void*)&pushed;
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = pushed ? (void*)&pushed : nullptr;
    return 0;
}
int cuCtxPushCurrent_v2(void* context) {
    pushed += context == (void*)&pushed;
    pushes++;
    return 0;
}
int cuCtxPopCurrent_v2(void** context) {
    *context = (void*)&pushed;
    pushed--;
    return 0;
}
int cuModuleLoadData(void** module, const void* image) {
    *module = dlopen(nullptr, RTLD_NOW);
    return memcmp(image, "\x7f" "ELF\0", 5) == 0 ? 0 : 200;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
    Dl_info own;
    dladdr((void*)&cuInit, &own);
    *function = dlsym(dlopen(own.dli_fname, RTLD_NOW), name);
    return *function == nullptr ? 500 : 0;
}
struct Launch {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void* stream;
    int* attributes;
    unsigned attribute_count;
};
int cuLaunchKernelEx(const Launch* one, void* function, void** places, void** extra) {
    if (pushed != 1) return 201;
    const unsigned *const grid = one->grid, *const block = one->block;
    if (refusing || grid[0] == 0 || grid[1] == 0 || grid[2] != 1 || block[1] != 1 || block[2] != 1 || one->shared != 0 || extra != nullptr) return 1;
    early = one->attribute_count == 1 && one->attributes[0] == 6 && one->attributes[2] == 1;
    Dl_info own;
    dladdr(function, &own);
    int64_t arguments[18] = {};
    for (int i = 0; i < count_of(own.dli_sname); i++) arguments[i] = *(const int64_t*)places[i];
    last_stream = (int64_t)one->stream;
    launch(function, arguments, grid[0], grid[1], block[0]);
    return 0;
}
int cuGetErrorString(int error, const char** words) {
    *words = error == 101 ? "invalid device ordinal" : error == 200 ? "device kernel image is invalid" : error == 500 ? "named symbol not found" : "refused";
    return 0;
}

int contexts_left() { return pushed; }
int times_pushed() { return pushes; }
int last_was_early() { return early; }
int64_t stream_of_last() { return last_stream; }
void refuse(int whether) { refusing = whether; }
}
