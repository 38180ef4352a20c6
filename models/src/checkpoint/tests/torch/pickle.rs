//! Pickles that do what no state dict does.

use super::*;

fn fault(value: Vec<u8>) -> PickleFault {
    match refused(&saved(value, &[&bytes(&[1.0, 2.0])]), &["data.pkl"]) {
        Error::Pickle { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

/// A state dict of one tensor, and `value` beside it.
fn beside(value: Vec<u8>) -> Checkpoint {
    let (_folder, checkpoint) = opened(&saved(dict(&[("w", floats(2)), ("other", value)]), &[&bytes(&[1.0, 2.0])]));
    assert_eq!(checkpoint.get("w").unwrap().to_f32().unwrap(), [1.0, 2.0]);
    checkpoint
}

#[test]
fn nothing_is_called() {
    let folder = Folder::new();
    let canary = folder.path("canary");
    let command = text(&format!("touch {}", canary.display()));
    for evil in [
        call("os", "system", std::slice::from_ref(&command)),
        call("builtins", "exec", std::slice::from_ref(&command)),
        [global("os", "system"), tuple(std::slice::from_ref(&command)), vec![0x81]].concat(),
        [text("os"), text("system"), vec![0x93], tuple(std::slice::from_ref(&command)), b"R".to_vec()].concat(),
        [call("argparse", "Namespace", &[]), dict(&[("a", int(1))]), b"b".to_vec()].concat(),
        [global("builtins", "dict"), tuple(&[]), dict(&[]), vec![0x92]].concat(),
        [tuple(&[text("module"), text("x")]), b"Q".to_vec()].concat(),
        [call("collections", "defaultdict", &[global("builtins", "list")]), text("k"), int(1), b"s".to_vec()].concat(),
    ] {
        assert_eq!(names(&beside(evil)), ["w"]);
    }
    assert!(!canary.exists());
}

#[test]
fn values_of_every_kind() {
    for value in [
        b"N".to_vec(),
        b"\x88".to_vec(),
        b"G\0\0\0\0\0\0\0\0".to_vec(),
        b"J\xff\xff\xff\xff".to_vec(),
        b"M\xff\xff".to_vec(),
        b"\x8a\0".to_vec(),
        b"\x8a\x0a0123456789".to_vec(),
        b"\x8b\x02\0\0\0ab".to_vec(),
        b"X\x02\0\0\0\xff\xfe".to_vec(),
        b"\x8c\x02ab".to_vec(),
        b"\x8d\x02\0\0\0\0\0\0\0ab".to_vec(),
        b"B\x01\0\0\0a".to_vec(),
        b"C\x01a".to_vec(),
        b"U\x01a".to_vec(),
        b"\x8e\x01\0\0\0\0\0\0\0a".to_vec(),
        b"\x96\x01\0\0\0\0\0\0\0a".to_vec(),
        b"]K\x01a(K\x02K\x03e".to_vec(),
        b"(K\x01l".to_vec(),
        b"\x8f(K\x01\x90".to_vec(),
        b"(K\x01\x91".to_vec(),
        b"(K\x01K\x02d".to_vec(),
        b"K\x01K\x02\x86".to_vec(),
        b"N(0N0".to_vec(),
        b"N2\x86".to_vec(),
        b"N(K\x011".to_vec(),
        b"N\x94h\x00\x86".to_vec(),
        b"\x95\0\0\0\0\0\0\0\0N".to_vec(),
    ] {
        assert_eq!(names(&beside(value)), ["w"]);
    }
}

#[test]
fn cycles_sharing_and_depth() {
    // A list in itself, and a dictionary in itself.
    beside(b"]q\x00h\x00a".to_vec());
    beside(b"}q\x00X\x01\0\0\0ah\x00s".to_vec());
    // Each of 60 tuples twice in the next one: 2^60 values, if they were values.
    let mut laughs = b")q\x00".to_vec();
    for i in 1..60u8 {
        laughs.extend([b'0', b'h', i - 1, b'h', i - 1, 0x86, b'q', i]);
    }
    beside(laughs);
    beside([vec![b')'; 1], vec![0x85; 1_000_000]].concat());
    beside([vec![b'('; 100_000], vec![b't'; 100_000]].concat());
}

#[test]
fn a_dictionary_that_is_its_own_state_dict() {
    let value = b"}q\x00X\x05\0\0\0modelh\x00s".to_vec();
    let file = saved([value, text("w"), floats(2), b"s".to_vec()].concat(), &[&bytes(&[1.0, 2.0])]);
    let (_folder, checkpoint) = opened(&file);
    assert_eq!((names(&checkpoint), checkpoint.weights_key()), (vec!["w"], Some("model")));
}

#[test]
fn a_key_that_occurs_twice() {
    let second = tensor(storage("FloatStorage", "0", 2), 1, &[1], &[1]);
    let (_folder, checkpoint) = opened(&saved(dict(&[("w", floats(2)), ("w", second)]), &[&bytes(&[1.0, 2.0])]));
    assert_eq!(checkpoint.get("w").unwrap().to_f32().unwrap(), [2.0]);
}

#[test]
fn instructions_without_operands() {
    let operand = |value: &[u8], wrong: u8| {
        let found = fault(value.to_vec());
        assert!(matches!(found, PickleFault::Operand { opcode, .. } if opcode == wrong), "{value:?}: {found}");
    };
    for opcode in *b"012abdelstuRQq\x81\x85\x86\x87\x90\x91\x92\x93\x94" {
        operand(&[opcode, 0], opcode);
    }
    // Nothing may be taken from below a mark.
    for opcode in *b"2absRQq\x81\x85\x86\x87\x92\x93\x94" {
        operand(&[b"NNN(", &[opcode, 0][..]].concat(), opcode);
    }
    operand(b".", b'.');
    operand(b"K\x01K\x02\x93", 0x93);
    operand(b"}(K\x01u", b'u');
    operand(b"K\x01K\x02K\x03s", b's');
    operand(b")K\x02K\x03s", b's');
}

#[test]
fn instructions_that_are_not_known() {
    for opcode in [b'I', b'L', b'F', b'S', b'V', b'P', b'g', b'p', b'i', b'o', 0x82, 0x97, 0x98, 0xff] {
        assert_eq!(fault(vec![opcode, b'1', b'\n']), PickleFault::Opcode { at: 2, opcode });
    }
    assert_eq!(fault(vec![0x80, 6]), PickleFault::Protocol { found: 6 });
    assert_eq!(fault(vec![b'h', 3]), PickleFault::Memo { at: 2, index: 3 });
    assert_eq!(fault(b"c\xff\nx\n".to_vec()), PickleFault::Text { at: 2 });
}

#[test]
fn lengths_that_lie() {
    for value in [
        &b"X\xff\xff\xff\xff"[..],
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
        b"\x8a\xff",
        b"C\xff",
        b"G",
        b"K",
        b"cmodule",
        b"\x95",
    ] {
        let mut zip = Zip::default();
        zip.add("archive/data.pkl", value);
        let file = zip.finish();
        let error = refused(&file, &["data.pkl", "truncated"]);
        assert!(matches!(error, Error::Pickle { fault: PickleFault::Truncated { .. }, .. }), "{value:?}");
    }
}

#[test]
fn a_pickle_without_end() {
    assert!(matches!(fault(b"N0".repeat(1 << 21)), PickleFault::Limit { .. }));
    let mut zip = Zip::default();
    zip.add("archive/data.pkl", b"\x80\x02}");
    assert!(matches!(refused(&zip.finish(), &["truncated"]), Error::Pickle { .. }));
}
