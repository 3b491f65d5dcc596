// As much of libdispatch as metal-cpp names. For checks away from a Mac; never used on one.
#pragma once

typedef struct dispatch_queue_s* dispatch_queue_t;
typedef struct dispatch_data_s* dispatch_data_t;
