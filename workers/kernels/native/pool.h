// The threads that share a kernel's work. They sleep between passes, and spin only a moment between the parts of one.
#pragma once

namespace dovetail {

// Called once for each thread: `part` of `parts`.
using Task = void (*)(void* context, int part, int parts);

void set_threads(int threads);
int threads();

// Runs all parts of `task` and returns when they are done; one call at a time. The caller does a part whose thread does not run, unless that belongs to another
// shard and has to stay `at_home`.
void run(Task task, void* context, bool at_home);

template <class Body>
void parallel(Body& body) {
    run([](void* context, int part, int parts) { (*static_cast<Body*>(context))(part, parts); }, &body, false);
}

template <class Body>
void parallel_at_home(Body& body) {
    run([](void* context, int part, int parts) { (*static_cast<Body*>(context))(part, parts); }, &body, true);
}

}  // namespace dovetail
