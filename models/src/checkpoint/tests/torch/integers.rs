//! Integers of every width, seen where an error repeats them: as the number of elements of a storage.

use super::*;

/// The number that `integer` puts on the stack.
fn read(integer: &[u8]) -> i64 {
    let id = [text("storage"), global("torch", "FloatStorage"), text("0"), text("cpu"), integer.to_vec()];
    let storage = [tuple(&id), b"Q".to_vec()].concat();
    let file = saved(dict(&[("w", tensor(storage, 0, &[1], &[1]))]), &[&bytes(&[1.0, 2.0])]);
    match refused(&file, &["tensor \"w\""]) {
        Error::TorchTensor { fault: TensorFault::StorageLength { elements, .. }, .. } => elements,
        other => panic!("{integer:?}: {other}"),
    }
}

#[test]
fn integers_of_a_fixed_width() {
    assert_eq!(read(b"K\xff"), 255);
    assert_eq!(read(b"M\xff\xff"), 0xffff);
    assert_eq!(read(b"J\xff\xff\xff\xff"), -1);
    assert_eq!(read(b"J\0\0\0\x80"), i64::from(i32::MIN));
}

/// Two's complement in as many bytes as are needed: the last one holds the sign.
#[test]
fn integers_of_any_width() {
    for (bytes, expected) in [
        (&b""[..], 0),
        (b"\x7f", 127),
        (b"\xff", -1),
        (b"\x80", -128),
        (b"\xff\x00", 255),
        (b"\x7f\xff", -129),
        (b"\xff\x7f\xff", -0x8001),
        (b"\0\0\0\x80", i64::from(i32::MIN)),
        (b"\0\0\0\x80\0", 1 << 31),
        (b"\0\0\0\0\0\0\x80", -1 << 55),
        (b"\0\0\0\0\0\0\0\x80", i64::MIN),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", i64::MAX),
    ] {
        let length = bytes.len() as u8;
        assert_eq!(read(&[&[0x8a, length], bytes].concat()), expected, "LONG1 {bytes:?}");
        assert_eq!(read(&[&[0x8b, length, 0, 0, 0], bytes].concat()), expected, "LONG4 {bytes:?}");
    }
}
