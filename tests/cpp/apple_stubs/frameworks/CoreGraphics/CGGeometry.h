// As much of CoreGraphics as metal-cpp names. For checks away from a Mac; never used on one.
#pragma once

struct CGSize {
  double width;
  double height;
};
