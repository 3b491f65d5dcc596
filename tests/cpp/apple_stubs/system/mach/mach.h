// As much of Mach as metal-cpp names. For checks away from a Mac; never used on one.
#pragma once

typedef int kern_return_t;
typedef unsigned int task_id_token_t;
