//! Other sizes: separable filters whose support grows with the reduction, each pass rounded to 8 bits. This is how Pillow
//! resizes, and with it most pipelines that models are trained with.

use super::Picture;

/// Times that a picture may be as long as it is short.
const LONGEST: usize = 16;

/// How a pixel of the new size is made of the old one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// The nearest pixel.
    Nearest,
    /// A triangle.
    Bilinear,
    /// Keys' cubic with a = -1/2 (Catmull-Rom).
    Bicubic,
}

impl Filter {
    /// Its name, as in the configuration of models.
    pub fn name(self) -> &'static str {
        match self {
            Filter::Nearest => "nearest",
            Filter::Bilinear => "bilinear",
            Filter::Bicubic => "bicubic",
        }
    }

    /// Half the filter's width, in pixels of the coarser size.
    fn support(self) -> f64 {
        match self {
            Filter::Nearest => 0.5,
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let x = x.abs();
        match self {
            Filter::Nearest => 1.0,
            Filter::Bilinear => (1.0 - x).max(0.0),
            Filter::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Filter::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            Filter::Bicubic => 0.0,
        }
    }

    /// For every new position, the first old one and the weights from there.
    fn taps(self, from: usize, to: usize) -> Vec<(usize, Vec<f64>)> {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let tap = |i: usize| {
            let center = (i as f64 + 0.5) * scale;
            if self == Filter::Nearest {
                return ((center as usize).min(from - 1), vec![1.0]);
            }
            let reach = self.support() * stretch;
            let first = (center - reach + 0.5).max(0.0) as usize;
            let last = ((center + reach + 0.5) as usize).min(from);
            let weights: Vec<f64> = (first..last).map(|j| self.at((j as f64 + 0.5 - center) / stretch)).collect();
            let sum: f64 = weights.iter().sum();
            (first, weights.into_iter().map(|weight| weight / sum).collect())
        };
        (0..to).map(tap).collect()
    }
}

impl Picture {
    /// The picture in another size; a side of 0 becomes 1.
    pub fn resized(&self, width: usize, height: usize, filter: Filter) -> Picture {
        let (width, height) = (width.max(1), height.max(1));
        // Of a picture that is all height, what comes first must not be far larger than both the picture and the result.
        let ends = (self.width * self.height).max(width * height);
        if width.saturating_mul(self.height) > LONGEST.saturating_mul(ends) {
            return self.with_height(height, filter).resized(width, height, filter);
        }
        let wide = if width == self.width { self.clone() } else { self.with_width(width, filter) };
        if height == self.height { wide } else { wide.with_height(height, filter) }
    }

    /// The picture with its shorter side of `side` pixels, the longer one in proportion, rounded down. Of a picture that is more than
    /// 16 times as long as it is short, only the middle: the rest would take any amount of memory.
    pub fn with_shorter_side(&self, side: usize, filter: Filter) -> Picture {
        let longest = LONGEST.saturating_mul(self.width.min(self.height));
        if self.width.max(self.height) > longest {
            return self.cropped(self.width.min(longest), self.height.min(longest)).with_shorter_side(side, filter);
        }
        let longer = |long: usize, short: usize| (side as u128 * long as u128 / short as u128) as usize;
        match self.width < self.height {
            true => self.resized(side, longer(self.height, self.width), filter),
            false => self.resized(longer(self.width, self.height), side, filter),
        }
    }

    fn with_width(&self, width: usize, filter: Filter) -> Picture {
        let taps = filter.taps(self.width, width);
        let mut samples = Vec::with_capacity(width * self.height * self.channels);
        for row in self.samples.chunks(self.width * self.channels) {
            for (first, weights) in &taps {
                for channel in 0..self.channels {
                    let from = row[first * self.channels + channel..].iter().step_by(self.channels);
                    samples.push(round(from.zip(weights).map(|(&sample, weight)| f64::from(sample) * weight).sum()));
                }
            }
        }
        Picture { width, samples, ..*self }
    }

    fn with_height(&self, height: usize, filter: Filter) -> Picture {
        let stride = self.width * self.channels;
        let mut samples = Vec::with_capacity(height * stride);
        let mut sums = vec![0.0; stride];
        for (first, weights) in filter.taps(self.height, height) {
            sums.fill(0.0);
            for (row, weight) in self.samples.chunks(stride).skip(first).zip(weights) {
                sums.iter_mut().zip(row).for_each(|(sum, &sample)| *sum += f64::from(sample) * weight);
            }
            samples.extend(sums.iter().map(|&sum| round(sum)));
        }
        Picture { height, samples, ..*self }
    }
}

/// The nearest of 0 to 255.
fn round(sample: f64) -> u8 {
    (sample + 0.5) as u8
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A file of a few kilobytes may hold as many pixels below each other as there may be.
    #[test]
    fn a_picture_that_is_all_height_takes_little_memory() {
        let high = Picture::new(1, 1 << 24, 1, vec![7; 1 << 24]).unwrap();
        let seen = high.resized(512, 512, Filter::Bicubic);
        assert_eq!((seen.width(), seen.height()), (512, 512));
        assert!(seen.plane(0).all(|sample| sample == 7));
    }

    fn picture() -> Picture {
        let sample = |i: usize| ((i / 3 % 9).pow(2) * 7 + i / 27 * 31 + i % 3 * 53) as u8;
        Picture::new(9, 7, 3, (0..189).map(sample).collect()).unwrap()
    }

    /// What Pillow 12 makes of the picture in 4 x 3 pixels.
    #[test]
    fn sizes_are_those_of_pillow() {
        let nearest = [
            38, 91, 144, 94, 147, 200, 206, 3, 56, 118, 171, 224, 100, 153, 206, 156, 209, 6, 12, 65, 118, 180, 233,
            30, 162, 215, 12, 218, 15, 68, 74, 127, 180, 242, 39, 92,
        ];
        let bilinear = [
            36, 89, 142, 90, 139, 178, 155, 115, 119, 153, 127, 146, 102, 155, 181, 148, 157, 107, 119, 99, 123, 134,
            127, 131, 168, 203, 62, 172, 105, 77, 107, 131, 128, 133, 115, 128,
        ];
        let bicubic = [
            26, 80, 137, 86, 142, 187, 159, 116, 116, 155, 127, 144, 98, 158, 195, 156, 165, 98, 118, 91, 123, 134,
            125, 135, 175, 212, 55, 175, 93, 73, 100, 134, 129, 133, 116, 128,
        ];
        for (filter, expected) in [(Filter::Nearest, nearest), (Filter::Bilinear, bilinear), (Filter::Bicubic, bicubic)]
        {
            assert_eq!(picture().resized(4, 3, filter).samples(), expected, "{filter:?}");
        }
    }

    /// The first row of what Pillow 12 makes of the picture in 13 x 10 pixels.
    #[test]
    fn larger_sizes_are_those_of_pillow() {
        let expected = [
            (Filter::Nearest, [0, 53, 106, 7, 60, 113, 7, 60, 113, 28, 81, 134]),
            (Filter::Bilinear, [0, 53, 106, 4, 57, 110, 12, 65, 118, 26, 79, 132]),
            (Filter::Bicubic, [0, 51, 104, 0, 53, 106, 9, 62, 115, 24, 77, 130]),
        ];
        for (filter, row) in expected {
            assert_eq!(picture().resized(13, 10, filter).samples()[..12], row, "{filter:?}");
        }
    }

    #[test]
    fn the_shorter_side_leads() {
        let sides = |width: usize, height: usize, side| {
            let picture = Picture::new(width, height, 1, vec![9; width * height]).unwrap();
            let resized = picture.with_shorter_side(side, Filter::Bicubic);
            assert!(resized.samples().iter().all(|&sample| sample == 9), "a constant stays");
            (resized.width(), resized.height())
        };
        assert_eq!(sides(9, 7, 4), (5, 4));
        assert_eq!(sides(7, 9, 14), (14, 18));
        assert_eq!(sides(5, 5, 5), (5, 5));
    }
}
