#pragma once  // which cuda.h asks for
