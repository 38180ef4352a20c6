//! Handwritten digits.

use super::Arguments;
use anyhow::{Context, Result};

/// 64 pixels from 0 to 16, and the digit that they show.
pub(crate) type Digit = ([f32; 64], usize);

/// Digits to train on.
const TRAINED: usize = 1500;

/// The digits of `digits.csv`: 64 numbers from 0 to 16 and a label each.
pub(crate) fn read(arguments: &Arguments) -> Result<Vec<Digit>> {
    let text = arguments.text("digits.csv")?;
    let mut digits = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let expected = || format!("digits.csv, line {}: expected 64 pixels from 0 to 16 and a digit", number + 1);
        let (pixels, label) = line.rsplit_once(',').with_context(expected)?;
        let pixels: Vec<f32> = pixels.split(',').map(str::parse).collect::<Result<_, _>>().with_context(expected)?;
        let pixels = <[f32; 64]>::try_from(pixels).ok().filter(|all| all.iter().all(|x| (0.0..=16.0).contains(x)));
        let label = label.parse().ok().filter(|label| *label < 10);
        digits.push(pixels.zip(label).with_context(expected)?);
    }
    Ok(digits)
}

/// The digits to train on, and those held out.
pub(crate) fn split(arguments: &Arguments) -> Result<(Vec<Digit>, Vec<Digit>)> {
    let mut digits = read(arguments)?;
    anyhow::ensure!(digits.len() > TRAINED, "digits.csv: expected more than {TRAINED} digits, found {}", digits.len());
    let held_out = digits.split_off(TRAINED);
    Ok((digits, held_out))
}

/// A digit of -1 to 1 in `side` x `side` pixels, scaled bilinearly, and moved by (down, right) pixels.
pub(crate) fn scaled(pixels: &[f32; 64], side: usize, (down, right): (f32, f32), out: &mut Vec<f32>) {
    let factor = 8.0 / side as f32;
    // Centres of pixels are at halves.
    let place = |i: usize, by: f32| {
        let at = ((i as f32 + 0.5 - by) * factor - 0.5).clamp(0.0, 7.0);
        (at as usize, (at as usize + 1).min(7), at.fract())
    };
    for y in 0..side {
        let (top, bottom, below) = place(y, down);
        for x in 0..side {
            let (left, beside, after) = place(x, right);
            let row = |y: usize| pixels[y * 8 + left] * (1.0 - after) + pixels[y * 8 + beside] * after;
            out.push((row(top) * (1.0 - below) + row(bottom) * below) / 8.0 - 1.0);
        }
    }
}
