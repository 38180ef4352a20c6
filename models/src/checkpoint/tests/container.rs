//! Safetensors files that are not what they say.

use super::*;

fn refused(bytes: &[u8], parts: &[&str]) -> Error {
    let folder = Folder::new();
    folder.write("model.safetensors", bytes);
    folder.refused(&[&["model.safetensors: "], parts].concat())
}

/// A header of one tensor.
fn one(dtype: &str, shape: &Value, begin: u64, end: u64) -> Value {
    json!({ "w": { "dtype": dtype, "shape": shape, "data_offsets": [begin, end] } })
}

#[test]
fn too_short_for_a_header_length() {
    assert!(matches!(refused(b"", &["0 bytes are too few"]), Error::TooShort { found: 0, .. }));
    assert!(matches!(refused(b"1234567", &["7 bytes are too few"]), Error::TooShort { found: 7, .. }));
}

#[test]
fn header_longer_than_the_file() {
    let mut bytes = file_of(&[("w", &[4], 1.0)]);
    bytes.truncate(40);
    assert!(matches!(refused(&bytes, &["but only 32 follow"]), Error::HeaderLength { found: 32, .. }));
    for length in [9, i64::MAX as u64, u64::MAX - 7, u64::MAX] {
        let error = refused(&[&length.to_le_bytes()[..], b"{}      "].concat(), &["but only 8 follow"]);
        assert!(matches!(error, Error::HeaderLength { expected, .. } if expected == length));
    }
}

#[test]
fn header_longer_than_the_limit() {
    let folder = Folder::new();
    let path = folder.write("model.safetensors", &100_000_001u64.to_le_bytes());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(100_000_100).unwrap();
    assert!(matches!(folder.refused(&["limit of 100000000"]), Error::JsonTooLong { found: 100_000_001, .. }));
}

#[test]
fn header_that_is_not_text() {
    assert!(matches!(refused(&raw(b"{\"\xff\":1}", b""), &["header is not UTF-8"]), Error::Utf8 { .. }));
    for header in [&b""[..], b"{", b"[]", b"null", b"{}{}", b"{\"a\":1}", b"\0\0\0"] {
        assert!(matches!(refused(&raw(header, b""), &["header cannot be read"]), Error::Json { .. }));
    }
    let deep = "{\"a\":".repeat(100_000);
    assert!(matches!(refused(&raw(deep.as_bytes(), b""), &["header cannot be read"]), Error::Json { .. }));
    let deep = format!("{{\"__metadata__\":{{}},\"w\":{{\"x\":{}", "[".repeat(100_000));
    assert!(matches!(refused(&raw(deep.as_bytes(), b""), &["header cannot be read"]), Error::Json { .. }));
}

#[test]
fn header_entries_of_another_form_name_their_tensor() {
    let well = one("F32", &json!([1]), 0, 4);
    for (key, value) in [
        ("dtype", json!(7)),
        ("shape", json!(1)),
        ("shape", json!([-1])),
        ("shape", json!([1.5])),
        ("shape", json!(["1"])),
        ("data_offsets", json!([0])),
        ("data_offsets", json!([0, 4, 8])),
        ("data_offsets", json!([-4, 0])),
        ("data_offsets", json!([0, 1e30])),
    ] {
        let mut header = well.clone();
        header["w"][key] = value;
        assert!(matches!(refused(&raw_json(&header, &[0; 4]), &["\"w\""]), Error::Json { .. }));
        header["w"].as_object_mut().unwrap().remove(key);
        refused(&raw_json(&header, &[0; 4]), &["\"w\"", key]);
    }
    let metadata = json!({ "__metadata__": { "format": 1 }, "w": well["w"] });
    assert!(matches!(refused(&raw_json(&metadata, &[0; 4]), &["expected a string"]), Error::Json { .. }));
}

#[test]
fn a_name_that_occurs_twice() {
    let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let header = format!(r#"{{"w":{entry},"w":{entry}}}"#);
    assert!(matches!(refused(&raw(header.as_bytes(), &[0; 4]), &["\"w\" occurs twice"]), Error::Json { .. }));
}

#[test]
fn types_that_are_not_supported() {
    for dtype in ["F8_E4M3", "F4", "C64", "", "f32"] {
        let error = refused(&raw_json(&one(dtype, &json!([4]), 0, 4), &[0; 4]), &["tensor \"w\" has type", dtype]);
        assert!(matches!(error, Error::TensorType { .. }));
    }
}

#[test]
fn offsets_beyond_the_file() {
    for (begin, end) in [(0, 8), (4, 0), (8, 12), (0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
        let error = refused(&raw_json(&one("F32", &json!([1]), begin, end), &[0; 4]), &["tensor \"w\" lies at bytes"]);
        assert!(matches!(error, Error::TensorOffsets { available: 4, .. }));
    }
    let mut truncated = file_of(&[("w", &[100], 1.0)]);
    truncated.pop();
    assert!(matches!(refused(&truncated, &["0 to 400", "has 399"]), Error::TensorOffsets { .. }));
}

#[test]
fn shapes_that_do_not_fit_their_bytes() {
    for shape in [json!([2]), json!([0]), json!([1, 3]), json!([u64::from(u32::MAX)])] {
        let error = refused(&raw_json(&one("F32", &shape, 0, 4), &[0; 4]), &["tensor \"w\" of type F32", "but has 4"]);
        assert!(matches!(error, Error::TensorLength { .. }));
    }
    for shape in [json!([1u64 << 62, 4]), json!([1u64 << 62]), json!([u64::MAX, u64::MAX])] {
        let error = refused(&raw_json(&one("F32", &shape, 0, 4), &[0; 4]), &["tensor \"w\" has an impossible shape"]);
        assert!(matches!(error, Error::TensorOverflow { .. }));
    }
}

fn two(a: [u64; 2], b: [u64; 2]) -> Value {
    let entry = |[begin, end]: [u64; 2]| json!({ "dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end] });
    json!({ "a": entry(a), "b": entry(b) })
}

#[test]
fn tensors_that_overlap() {
    for (a, b) in [([0, 4], [3, 8]), ([0, 8], [0, 8]), ([0, 8], [2, 4]), ([0, 8], [4, 4]), ([3, 8], [0, 4])] {
        let error = refused(&raw_json(&two(a, b), &[0; 8]), &["overlap", "\"a\"", "\"b\""]);
        assert!(matches!(error, Error::TensorOverlap { .. }));
    }
}

#[test]
fn bytes_of_no_tensor() {
    for (a, b, from, to) in [([1, 4], [4, 8], 0, 1), ([0, 4], [5, 8], 4, 5), ([0, 4], [4, 7], 7, 8)] {
        let parts: &[&str] = &[&format!("bytes {from} to {to} after the header belong to no tensor")];
        assert!(matches!(refused(&raw_json(&two(a, b), &[0; 8]), parts), Error::Gap { .. }));
    }
}

#[test]
fn no_tensors() {
    for header in [json!({}), json!({ "__metadata__": { "format": "pt" } })] {
        assert!(matches!(refused(&raw_json(&header, b""), &["no tensors"]), Error::NoTensors { .. }));
    }
}

#[test]
fn what_the_format_allows() {
    let folder = Folder::new();
    let header = json!({
        "__metadata__": { "format": "pt", "note": "{}" },
        "b": { "dtype": "F64", "shape": [1, 1], "data_offsets": [1, 9], "comment": [] },
        "a": { "dtype": "BOOL", "shape": [1], "data_offsets": [0, 1] },
        "empty": { "dtype": "F32", "shape": [3, 0], "data_offsets": [1, 1] },
    });
    let mut text = header.to_string().into_bytes();
    text.extend(b"      ");
    let file = raw(&text, &[1, 0, 0, 0, 0, 0, 0, 0, 0x40]);
    folder.write("model.safetensors", &file);
    let checkpoint = folder.open().unwrap();
    assert_eq!(checkpoint.metadata().get("format").map(String::as_str), Some("pt"));
    assert_eq!(checkpoint.get("empty").unwrap().to_f32().unwrap(), [0f32; 0]);
    let b = checkpoint.get("b").unwrap();
    assert_eq!((b.to_f32().unwrap(), b.offset()), (vec![2.0], file.len() as u64 - 8));
}

/// Why headers are not read by the format's own crate: it takes a name that occurs twice, and its errors name no tensor.
#[test]
fn what_the_formats_own_reader_does_not_say() {
    let peer = |bytes: &[u8]| ::safetensors::SafeTensors::read_metadata(bytes).map(drop).map_err(|e| e.to_string());
    let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let twice = raw(format!(r#"{{"w":{entry},"w":{entry}}}"#).as_bytes(), &[0; 4]);
    assert_eq!(peer(&twice), Ok(()));
    refused(&twice, &["\"w\" occurs twice"]);
    for (header, data) in [
        (json!({ "weight": { "dtype": "F32", "shape": [2], "data_offsets": [0, 4] } }), 4),
        (json!({ "weight": { "dtype": "F32", "shape": [1u64 << 62, 4], "data_offsets": [0, 4] } }), 4),
        (json!({ "weight": { "dtype": "F32", "shape": [2], "data_offsets": [0, 8] } }), 4),
    ] {
        let bytes = raw_json(&header, &vec![0; data]);
        let message = peer(&bytes).expect_err("no such tensor fits its file");
        assert!(!message.contains("weight"), "{message}");
        refused(&bytes, &["\"weight\""]);
    }
}

/// Mutated files never panic; the format's own reader accepts what is accepted here, and sees the same bytes.
#[test]
fn mutated_files_are_refused_or_read_alike() {
    let well = file_of(&[("blocks.0.w", &[2, 3], 1.0), ("blocks.0.b", &[3], 2.0), ("s", &[], 3.0)]);
    let text = 8..well.len() - 40;
    let folder = Folder::new();
    let mut random = Random(1);
    let mut accepted = 0;
    for _ in 0..4000 {
        let mut bytes = well.clone();
        for _ in 0..1 + random.below(3) {
            mutate(&mut bytes, &text, &mut random);
        }
        let path = folder.write("model.safetensors", &bytes);
        let Ok(checkpoint) = Checkpoint::open(&path, None) else { continue };
        accepted += 1;
        let peer = ::safetensors::SafeTensors::deserialize(&bytes).expect("the format's own reader should accept it");
        assert_eq!(checkpoint.names().count(), peer.len());
        for (name, view) in peer.iter() {
            let weight = checkpoint.get(name).unwrap();
            assert_eq!((weight.shape(), &bytes_of(weight)[..]), (view.shape(), view.data()));
            weight.to_f32().unwrap();
            let _ = weight.check_finite();
        }
    }
    assert!((40..3600).contains(&accepted), "{accepted} of 4000 accepted: the mutations test too little");
}

fn mutate(bytes: &mut Vec<u8>, text: &std::ops::Range<usize>, random: &mut Random) {
    const PIECES: [&[u8]; 10] = [b"0", b"9", b"-", b"{", b"}", b"\"", b",", b"[", b"99999999999999999999", b"\xff"];
    let at = |random: &mut Random, len: usize| random.below(text.end.min(len).max(1));
    match random.below(6) {
        0 => bytes.truncate(at(random, bytes.len())),
        1 => bytes.extend([0; 3]),
        2 if !bytes.is_empty() => {
            let i = at(random, bytes.len());
            bytes[i] ^= 1 << random.below(8);
        }
        3 if bytes.len() > text.start => {
            let i = text.start + random.below(bytes.len() - text.start);
            let piece = PIECES[random.below(PIECES.len())];
            bytes.splice(i..i + 1, piece.iter().copied());
        }
        // Digits make headers that still parse, with other shapes and offsets.
        _ => {
            let digits: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
            if !digits.is_empty() {
                bytes[digits[random.below(digits.len())]] = b'0' + random.below(10) as u8;
            }
        }
    }
}

/// A linear congruential generator (Knuth's MMIX constants).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}
