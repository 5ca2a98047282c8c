//! Generators of request bodies: valid ones and invalid ones.

use proptest::collection::vec;
use proptest::prelude::*;

/// Valid JSON text, or valid JSON text with up to three bytes changed.
pub(super) fn any_body() -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), 0..3, prop::sample::select(INTERESTING));
    (any_object(), vec(change, 0..=3)).prop_map(|(text, changes)| {
        let mut body = text.into_bytes();
        for (at, change, byte) in changes {
            let at = at.index(body.len());
            match change {
                0 => body[at] = byte,
                1 => body.insert(at, byte),
                _ if body.len() > 1 => drop(body.remove(at)),
                _ => (),
            }
        }
        body
    })
}

/// A JSON value as text.
pub(super) fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        any_object(),
        any_string(),
        Just("[ ]".to_owned()),
        Just("-1.5e3".to_owned()),
        any_interesting_part()
    ]
}

/// Parts and tools that admission looks at, whole or in fragments.
fn any_interesting_part() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(TEXTS).prop_map(|text| format!("\"{text}\""));
    leaf.prop_recursive(4, 24, 4, |inner| {
        let member = (prop::sample::select(JUDGED), inner.clone());
        prop_oneof![
            vec(inner, 0..4).prop_map(|items| format!("[{}]", items.join(","))),
            vec(member, 0..4).prop_map(|members| {
                let members: Vec<_> =
                    members.into_iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
                format!("{{{}}}", members.join(","))
            }),
        ]
    })
}

/// A JSON object as text, in every spelling that JSON allows; sometimes with a duplicate key.
pub(super) fn any_object() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        prop::sample::select(&["true", "false", "null", "{}", "[ ]"][..]).prop_map(String::from),
        "-?(0|[1-9][0-9]{0,3})(\\.[0-9]{1,3})?([eE][+-]?[0-9]{1,2})?",
        any_string(),
    ];
    let value = leaf.prop_recursive(4, 40, 5, |inner| {
        prop_oneof![
            (any_space(), vec(inner.clone(), 0..5))
                .prop_map(|(s, items)| { format!("[{s}{}{s}]", items.join(&format!("{s},"))) }),
            any_members(inner),
        ]
    });
    (any_space(), any_members(value), any_space())
        .prop_map(|(head, object, tail)| head + &object + &tail)
}

fn any_members(value: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    let key = prop_oneof![
        2 => any_string(),
        3 => prop::sample::select(KEYS).prop_map(|key| format!("\"{key}\"")),
    ];
    (any_space(), vec((key, value), 0..6)).prop_map(|(s, members)| {
        let members: Vec<_> =
            members.into_iter().map(|(key, value)| format!("{key}{s}:{s}{value}")).collect();
        format!("{{{s}{}{s}}}", members.join(&format!("{s},{s}")))
    })
}

fn any_string() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[ -!#-\\[\\]-~]{0,12}",
        prop::sample::select(PARTS).prop_map(String::from),
        any::<char>()
            .prop_filter("needs no escape", |c| *c >= ' ' && !"\"\\".contains(*c))
            .prop_map(String::from),
        // Text that is long enough to fill whole blocks of the scanner.
        "[a-z ]{60,200}",
    ];
    vec(part, 0..4).prop_map(|parts| format!("\"{}\"", parts.concat()))
}

fn any_space() -> impl Strategy<Value = String> {
    prop_oneof![4 => Just(String::new()), 1 => "[ \n\r\t]{1,3}"]
}

const KEYS: &[&str] = &[
    "",
    "a",
    "\\u0061",
    "role",
    "rol\\u0065",
    "content",
    "fifteen bytes..",
    "sixteen bytes...",
    "sixteen byte\\u0073...",
    "a key that is longer than the sixty-four bytes that are kept of it, and then some",
    "a key that is longer than the sixty-four bytes that are kept of it, and then more",
    "a key that is longer than the sixty-four bytes th\\u0061t are kept of it, and then more",
];

const JUDGED: &[&str] = &[
    "type",
    "typ\\u0065",
    "url",
    "image_url",
    "source",
    "file_id",
    "file_data",
    "input",
    "content",
    "tools",
    "name",
    "role",
    "environment",
    "definition",
    "googleSearch",
];

const TEXTS: &[&str] = &[
    "",
    "function",
    "functi\\u006fn",
    "web_search_20250305",
    "item_reference",
    "data:image/png;base64,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "d\\u0061ta:,",
    "iVBORw0KGgoAAAANSUhEUgAACAAAAAMACAIAAAA=",
    "\\/9j\\/wAARCAAQABA",
    "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAA==",
    "JVBERi0xLjQKL1R5cGUvUGFnZS9Db3VudCAxPj4=",
    "https://example.org/a/path/that/is/longer/than/what/is/kept",
    "\\ud83d\\ude00\\ud83d\\ude00\\ud83d\\ude00\\ud83d\\ude00\\ud83d\\ude00\\ud83d\\ude00\\ud83d\\ude00\\ud83d\\ude00\\ud83d\\ude00",
];

const PARTS: &[&str] = &[
    "\\n",
    "\\\"",
    "\\\\",
    "\\/",
    "\\b\\f\\r\\t",
    "\\u00e9",
    "\\u4F60",
    "\\ud83d\\ude00",
    "\\uD800",
    "\\udc00",
    "\\ud800\\u0041",
    "\\u12g4",
    "\\x",
    "é",
    "漢字",
    "😀",
    "\u{7f}",
    "\\u0000",
];

const INTERESTING: &[u8] = &[
    b'"', b'\\', b'{', b'}', b'[', b']', b':', b',', b' ', b'\n', 0, 0x1f, 0x7f, 0x80, 0xbf, 0xc0,
    0xc3, 0xe0, 0xed, 0xa0, 0xef, 0xf0, 0xf4, 0xff, b'0', b'1', b'-', b'.', b'e', b'u', b'd', b'8',
    b't', b'n',
];
