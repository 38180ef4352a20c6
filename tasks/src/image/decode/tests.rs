#![allow(clippy::unwrap_used)]

use super::*;
use ::png::{BitDepth, ColorType};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::path::PathBuf;

fn write(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("picture");
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn png(color: ColorType, depth: BitDepth, palette: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = ::png::Encoder::new(&mut bytes, 2, 1);
    encoder.set_color(color);
    encoder.set_depth(depth);
    if !palette.is_empty() {
        encoder.set_palette(palette.to_vec());
    }
    encoder.write_header().unwrap().write_image_data(data).unwrap();
    bytes
}

#[test]
fn every_kind_of_png_is_gray_or_colours_of_8_bits() {
    let cases: [(Vec<u8>, usize, &[u8]); 6] = [
        (png(ColorType::Grayscale, BitDepth::Eight, &[], &[7, 9]), 1, &[7, 9]),
        (png(ColorType::Grayscale, BitDepth::One, &[], &[0b0100_0000]), 1, &[0, 255]),
        (png(ColorType::GrayscaleAlpha, BitDepth::Eight, &[], &[7, 0, 9, 255]), 1, &[255, 9]),
        (
            png(ColorType::Rgb, BitDepth::Sixteen, &[], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
            3,
            &[1, 3, 5, 7, 9, 11],
        ),
        (png(ColorType::Rgba, BitDepth::Eight, &[], &[1, 2, 3, 0, 4, 5, 6, 255]), 3, &[255, 255, 255, 4, 5, 6]),
        (png(ColorType::Indexed, BitDepth::Eight, &[1, 2, 3, 4, 5, 6], &[1, 0]), 3, &[4, 5, 6, 1, 2, 3]),
    ];
    for (bytes, channels, samples) in cases {
        let (_folder, path) = write(&bytes);
        assert_eq!(Picture::open(&path).unwrap(), Picture::new(2, 1, channels, samples.to_vec()).unwrap());
    }
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

#[test]
fn a_jpeg_is_in_colours_even_where_it_is_gray() {
    let near = |found: &[u8], expected: [u8; 3]| found.iter().zip(expected).all(|(&a, b)| a.abs_diff(b) <= 3);
    let colours = Picture::open(&data("red-over-blue.jpg")).unwrap();
    assert_eq!((colours.width(), colours.height(), colours.channels()), (16, 16, 3));
    assert!(near(&colours.samples()[..3], [200, 40, 40]) && near(&colours.samples()[765..], [40, 40, 200]));
    let gray = Picture::open(&data("gray.jpg")).unwrap();
    assert!(near(&gray.samples()[..3], [200; 3]) && near(&gray.samples()[765..], [40; 3]));
}

/// What Pillow and numpy read from a file: `tests/data/images/make.py`.
#[derive(Deserialize)]
struct Expected {
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

fn expected() -> BTreeMap<String, Expected> {
    serde_json::from_slice(&std::fs::read(data("images/expected.json")).unwrap()).unwrap()
}

/// EXIF, 16 bits, CMYK, YCCK, gray, palettes and transparency.
#[test]
fn pictures_are_those_of_pillow() {
    for (name, expected) in expected() {
        let picture = Picture::open(&data("images").join(&name)).unwrap();
        assert_eq!((picture.width(), picture.height()), (expected.width, expected.height), "{name}");
        let found: Vec<u8> =
            picture.samples().chunks(picture.channels()).flat_map(|p| [p[0], p[p.len() / 2], p[p.len() - 1]]).collect();
        // Decoders of JPEG and lossy WebP may round otherwise.
        let allowed = if name.ends_with(".jpg") || name == "lossy.webp" { 4 } else { 0 };
        let error = found.iter().zip(&expected.rgb).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(error.is_some_and(|error| error <= allowed), "{name}: {error:?}\n{found:?}\n{:?}", expected.rgb);
    }
}

#[test]
fn what_was_done_to_a_picture_is_told() {
    let told = |name: &str| {
        let (_, adjustments) = Picture::open_told(&data("images").join(name)).unwrap();
        adjustments.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(told("orientation-1.png"), "");
    assert_eq!(told("gray.jpg"), "");
    assert_eq!(told("orientation-6.jpg"), "turned as its EXIF orientation 6 says");
    assert_eq!(told("orientation-8.webp"), "turned as its EXIF orientation 8 says");
    assert_eq!(told("rgba-16.png"), "16 bits a sample cut to 8; transparent pixels put over white");
    assert_eq!(told("palette.png"), "transparent pixels put over white");
    assert_eq!(told("ycck.jpg"), "CMYK converted to RGB");
}

/// Pillow refuses all of them, too.
#[test]
fn no_part_of_a_file_is_taken_for_the_whole() {
    for name in expected().into_keys() {
        let bytes = std::fs::read(data("images").join(&name)).unwrap();
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "{name}: {len} of {}", bytes.len());
        }
        let reason = decode(&bytes[..bytes.len() - 1]).unwrap_err().to_string();
        assert_eq!(reason, TRUNCATED, "{name}");
    }
}

#[test]
fn other_files_are_refused() {
    let complete = png(ColorType::Grayscale, BitDepth::Eight, &[], &[7, 9]);
    let signature = b"\x89PNG\r\n\x1a\n";
    for (bytes, expected) in [
        (&b""[..], "the file is empty"),
        (b"GIF89a", "it is a GIF file: convert it to one of them"),
        (b"\0\0\0\x20ftypavif", "it is an AVIF file: convert it to one of them"),
        (b"BM1234", "it is a BMP file"),
        (b"once upon a time", "it begins like none of them"),
        (signature, TRUNCATED),
        (&complete[..complete.len() - 20], TRUNCATED),
        (b"\xff\xd8\xff\xe0broken", ""),
    ] {
        let (_folder, path) = write(bytes);
        let error = Picture::open(&path).unwrap_err();
        assert!(error.to_string().ends_with("picture: not a PNG, JPEG or WebP image"), "{error}");
        let reason = error.source().unwrap().to_string();
        assert!(!reason.is_empty() && reason.starts_with(expected), "{reason}");
    }
    let message = Picture::open(Path::new("/nowhere.png")).unwrap_err().to_string();
    assert_eq!(message, "/nowhere.png: image not found");
}
