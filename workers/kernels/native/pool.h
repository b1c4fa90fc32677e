// The threads that share a kernel's work. They sleep between passes, and spin only a moment between the parts of one.
#pragma once

namespace dovetail {

// Called once for each thread, and where that does not run by the caller in its place: `part` of `parts`.
using Task = void (*)(void* context, int part, int parts);

void set_threads(int threads);
int threads();

// Run all parts of `task` and return when they are done; one call at a time.
void run(Task task, void* context);

template <class Body>
void parallel(Body& body) {
    run([](void* context, int part, int parts) { (*static_cast<Body*>(context))(part, parts); }, &body);
}

}  // namespace dovetail
