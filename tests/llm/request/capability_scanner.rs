//! Tests of hosted capabilities: which parts of a request need a capability, and which only look as if they did.

use std::fmt::Write;

use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request::{
    BodyPolicy, BodyPolicyError, ProviderCapability, ScannedBody, admit_body,
};
use insta::assert_snapshot;
use proptest::prelude::*;

use super::{concat_rope, read_frames, send_body, split_frames};

use GatewayRoute::{ChatCompletions, CountTokens, Embeddings, Messages, Responses};

/// G6: A request for a tool that the provider runs is refused, and the refusal names the capability that would grant
/// it.
#[test]
fn a_hosted_tool_is_refused_by_name() {
    let mut table = String::new();
    for (route, fields) in DENIED {
        let refusal = refused_fields(*route, fields);
        let BodyPolicyError::CapabilityNotGranted { capability, field, detail } = &refusal else {
            panic!("{route:?} {fields}: {refusal}")
        };
        let detail = detail.as_deref().unwrap_or("-");
        writeln!(
            table,
            "{:<17} {:<16} {field} {detail}  {fields}",
            capability.name(),
            route.name()
        )
        .unwrap();
    }
    assert_snapshot!(table);
}

/// G6: Each capability can be granted, and the grant covers nothing else.
#[test]
fn a_grant_allows_its_capability_and_nothing_else() {
    for (route, fields) in DENIED {
        let BodyPolicyError::CapabilityNotGranted { capability, .. } =
            refused_fields(*route, fields)
        else {
            panic!("{fields}")
        };
        let body = format!(r#"{{"model":"m",{fields}}}"#);
        let granted = BodyPolicy { capabilities: [capability].into(), ..BodyPolicy::default() };
        assert!(send_body(*route, &granted, &body).is_ok(), "{body}");
        let others =
            ProviderCapability::ALL.into_iter().filter(|other| *other != capability).collect();
        let others = BodyPolicy { capabilities: others, ..BodyPolicy::default() };
        assert!(send_body(*route, &others, &body).is_err(), "{body}");
    }
}

/// G6: Data of the client is not examined, whatever its keys are called, and tools that the client runs pass.
#[test]
fn data_and_tools_of_the_client_pass_unchanged() {
    for (route, fields) in ALLOWED {
        let body = format!(r#"{{"model":"m",{fields},"store":false}}"#);
        match send_body(*route, &BodyPolicy::default(), &body) {
            Ok(sent) => assert!(sent.contains(fields), "{sent}"),
            Err(refusal) => panic!("{route:?} {fields}: {refusal}"),
        }
    }
}

/// G6: Codex sends, by default, a search tool that reaches nothing outside. The gateway removes the tool instead of
/// refusing the call.
#[test]
fn a_search_that_reaches_nothing_is_removed() {
    let search = r#"{"type":"web_search","external_web_access":false}"#;
    let function = r#"{"type":"function","name":"f"}"#;
    let spaced = r#"{"filters":{"a":["}",{"b":"\""}]}, "ex\u0074ernal_web_access" : false , "type":"web_search" }"#;
    let mut table = String::new();
    for fields in [
        format!(r#""tools":[{search}]"#),
        format!(r#""tools":[{search}],"tool_choice":"auto","parallel_tool_calls":true,"top_p":1"#),
        format!(r#""tools":[{search},{function}],"tool_choice":"auto""#),
        format!(r#""tools":[{function},{search}],"tool_choice":"auto""#),
        format!(r#""tools":[{function} , {search}  ,{function}]"#),
        format!("\"tools\":[\n  {function},\n  {spaced}\n  ]"),
        format!(r#""tools":[{search},{search}]"#),
        r#""tools":[{"type":"web_search","external_web_access":true}]"#.to_owned(),
        r#""tools":[{"type":"web_search","external_web_access":0}]"#.to_owned(),
        r#""tools":[{"type":"web_search","external_web_access":null}]"#.to_owned(),
        format!(r#""tools":[{search},{{"type":"web_search"}}]"#),
        format!(r#""tools":[{{"type":"namespace","name":"n","tools":[{search}]}}]"#),
        format!(r#""input":[{{"role":"user","content":"x","tools":[{search}]}}]"#),
    ] {
        let body = format!(r#"{{"model":"m",{fields},"store":false}}"#);
        let outcomes = [1, 7, 4096].map(|size| {
            let body =
                read_frames(Responses, split_frames(body.as_bytes(), size).into_pieces()).unwrap();
            let call = admit_body(&BodyPolicy::default(), body);
            match call {
                Ok(call) => {
                    let said =
                        call.changes.iter().map(|change| change.field.clone()).collect::<Vec<_>>();
                    let sent = String::from_utf8(concat_rope(&call.into_body())).unwrap();
                    let _: serde_json::Value = serde_json::from_str(&sent).unwrap();
                    format!("{} {sent}", said.join(", "))
                }
                Err(refusal) => format!("{} {}", refusal.code(), refusal.field_at_fault()),
            }
        });
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
        writeln!(table, "{}", outcomes[0]).unwrap();
    }
    assert_snapshot!(table, @r#"
    tools.web_search {"model":"m","store":false}
    tools.web_search {"model":"m","top_p":1,"store":false}
    tools.web_search {"model":"m","tools":[{"type":"function","name":"f"}],"tool_choice":"auto","store":false}
    tools.web_search {"model":"m","tools":[{"type":"function","name":"f"}],"tool_choice":"auto","store":false}
    tools.web_search {"model":"m","tools":[{"type":"function","name":"f"} , {"type":"function","name":"f"}],"store":false}
    tools.web_search {"model":"m","tools":[
      {"type":"function","name":"f"}
      ],"store":false}
    capability_not_granted tools
    capability_not_granted tools
    capability_not_granted tools
    capability_not_granted tools
    capability_not_granted tools
    capability_not_granted tools
    capability_not_granted input
    "#);
    let granted = BodyPolicy {
        capabilities: [ProviderCapability::WebSearch].into(),
        ..BodyPolicy::default()
    };
    let body = format!(r#"{{"model":"m","tools":[{search}],"store":false}}"#);
    assert_eq!(send_body(Responses, &granted, &body).unwrap(), body);
}

/// G6: The scanner finds a capability wherever a frame ends and however the text is escaped.
#[test]
fn a_capability_is_found_at_every_split() {
    for (route, fields) in DENIED {
        let escaped =
            fields.replace("\"type\"", "\"t\\u0079pe\"").replace("\"url\"", "\"\\u0075rl\"");
        for body in [fields, &&*escaped].map(|fields| format!(r#"{{"model":"m",{fields}}}"#)) {
            let whole = send_body(*route, &BodyPolicy::default(), &body).unwrap_err();
            for size in [1, 2, 3, 5, 7] {
                let pieces = split_frames(body.as_bytes(), size).into_pieces();
                let body = read_frames(*route, pieces).unwrap();
                let split = admit_body(&BodyPolicy::default(), body);
                assert_eq!(split.unwrap_err(), whole);
            }
        }
    }
}

/// G6, G10: The refusal says what is missing and how the operator can grant it.
#[test]
fn a_refusal_says_how_an_operator_grants_it() {
    let refusal =
        refused_fields(Messages, r#""tools":[{"type":"web_search_20991231","name":"web_search"}]"#);
    assert_eq!((refusal.status().as_u16(), refusal.code()), (403, "capability_not_granted"));
    assert_snapshot!(refusal, @"`tools` needs `web_search` (`web_search_20991231`), which this run has not been granted; its operator can grant it, in `policy.body.capabilities` or `CAPABILITIES`");
}

/// G6: The client sends a search result back with its address. The provider does not fetch that address; it fetches any
/// other address of a part.
#[test]
fn an_address_of_a_part_needs_a_capability_unless_it_is_a_search_result() {
    let part = |part: &str| {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":[{part}]}}]}}"#);
        send_body(Messages, &BodyPolicy::default(), &body)
    };
    assert!(part(r#"{"url":"https://x","type":"web_search_result"}"#).is_ok());
    for denied in [
        r#"{"type":"image","url":"https://x"}"#,
        r#"{"type":" web_search_result","url":"https://x"}"#,
        r#"{"type":"web_search_result","image_url":"https://x"}"#,
        r#"{"type":"web_search_result","input_audio":{"url":"https://x"}}"#,
    ] {
        assert!(part(denied).is_err(), "{denied}");
    }
}

/// G9: A cache with a longer lifetime costs more than any usage report shows, so its lifetime is checked.
#[test]
fn a_cache_lasts_as_long_as_is_billed_with_the_call() {
    for fields in [
        r#""messages":[{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":"ephemeral","ttl":"61320000h"}}]}]"#,
        r#""system":[{"type":"text","text":"a","cache_control":{"ttl":" 5m"}}]"#,
        r#""tools":[{"name":"f","cache_control":{"ttl":3600}}]"#,
        r#""cache_control":{"type":"ephemeral","ttl":"2h"}"#,
    ] {
        let refusal = refused_fields(Messages, fields);
        assert_eq!(
            (refusal.code(), refusal.field_at_fault()),
            ("invalid_field", "cache_control.ttl"),
            "{fields}"
        );
    }
}

/// Returns the input tokens that are reserved for a body, however it arrives.
fn reserved_tokens(route: GatewayRoute, policy: &BodyPolicy, body: &str) -> u64 {
    let of = |body| admit_body(policy, body).unwrap().input_estimate.0;
    let whole = of(ScannedBody::scan_frame(route, body.to_owned().into()).unwrap());
    for size in [body.len(), 4096, 7] {
        let frames = split_frames(body.as_bytes(), size).into_pieces();
        assert_eq!(of(read_frames(route, frames).unwrap()), whole, "frames of {size}: {body}");
    }
    whole
}

/// Returns the input tokens that are reserved beyond those for the body's length.
fn estimated_tokens(route: GatewayRoute, fields: &str) -> u64 {
    let body = format!(r#"{{"model":"m",{fields}}}"#);
    reserved_tokens(route, &BodyPolicy::default(), &body) - (body.len() as u64).div_ceil(3)
}

/// G9: Media, token counts and a second pass are reserved for, in addition to the length of the request.
#[test]
fn a_request_reserves_what_its_parts_cost() {
    let image = |data| {
        format!(
            r#""messages":[{{"role":"user","content":[{{"type":"image","source":{{"type":"base64","media_type":"image/png","data":"{data}"}}}}]}}]"#
        )
    };
    // In order: 2048 x 768; no size; a JPEG with a segment before its size; a GIF; a WebP of 2048 x 768; no pixels.
    for (data, tokens) in [
        ("iVBORw0KGgoAAAANSUhEUgAACAAAAAMACAIAAAA=", 2098),
        ("/9j/4AAQSkZJRgABAQ==", 6192),
        ("/9j/4AADAP/AABEIAwAIAAA=", 2098),
        ("\\/9j\\/4AADAP\\/AABEIAwAIAAA=", 2098),
        ("R0lGODlhAQABAAAAACwAAAAAAQABAA==", 258),
        ("data:image/webp;base64,UklGRgAAAABXRUJQVlA4WAAAAAAAAAAA/wcA/wIA", 2098),
        ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAACAAAAAMACAIAAAA=", 2098),
        ("iVBORw0KGgoAAAANSUhEUgAAAAAAAAMACAIAAAA=", 6192),
        ("iVBORw0KGgoAAAANSUhEUoAAAAAAAAMACAIAAAA=", 6192),
        ("data:image/avif;base64,AAAA", 6192),
    ] {
        assert_eq!(estimated_tokens(Messages, &image(data)), tokens, "{data}");
    }
    let remote = r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://x"}}]}]"#;
    let granted = BodyPolicy {
        capabilities: [ProviderCapability::RemoteMedia].into(),
        ..BodyPolicy::default()
    };
    let body = format!(r#"{{"model":"m",{remote}}}"#);
    let fetched = reserved_tokens(ChatCompletions, &granted, &body);
    assert_eq!(fetched, (body.len() as u64).div_ceil(3) + 6192);
    let pdf = |data: &str| {
        format!(
            r#""messages":[{{"role":"user","content":[{{"type":"document","source":{{"type":"base64","media_type":"application/pdf","data":"{data}"}}}}]}}]"#
        )
    };
    // A document without a page count; a document of one page; the one-page document beside one without a count.
    assert_eq!(estimated_tokens(Messages, &pdf("JVBERi0xLjc=")), 200_000);
    let page = "JVBERi0xLjQKL1R5cGUvUGFnZS9Db3VudCAxPj4=";
    assert_eq!(estimated_tokens(Messages, &pdf(page)), 3000);
    assert_eq!(estimated_tokens(Messages, &pdf(&format!("{page}=="))), 3000);
    assert_eq!(estimated_tokens(Messages, &pdf(&format!("{page}AAAA"))), 200_000);
    assert_eq!(estimated_tokens(Messages, &pdf("UEsDBA==")), 200_000);
    // Media beyond the number that is read count as the most expensive kind.
    let many = format!(
        r#""messages":[{{"role":"user","content":[{}]}}]"#,
        vec![r#"{"image":"R0lGODlhAQABAAAAACwAAAAAAQABAA=="}"#; 300].join(",")
    );
    assert_eq!(estimated_tokens(ChatCompletions, &many), 256 * 258 + 44 * 6192);
    let numbers = (0..300).map(|_| "1").collect::<Vec<_>>().join(",");
    assert_eq!(estimated_tokens(Embeddings, &format!(r#""input":[{numbers}]"#)), 100);
    let text = format!(r#""messages":[{{"role":"user","content":"{}"}}]"#, "x".repeat(3000));
    assert_eq!(estimated_tokens(Messages, &text), 0);
    let compacted =
        format!(r#"{text},"context_management":{{"edits":[{{"type":"compact_20260112"}}]}}"#);
    assert!(estimated_tokens(Messages, &compacted) > 1000);
}

/// G9: A provider adds a preamble to a request with tools, and a description to each tool that it defines itself. Both
/// are input, and both are reserved for.
#[test]
fn text_that_the_provider_adds_is_reserved_for() {
    let own = |fields: &str| estimated_tokens(Messages, fields);
    assert_eq!(own(r#""tools":[]"#), 0);
    assert_eq!(
        own(r#""tools":[{"name":"f","input_schema":{}},{"type":"custom","name":"g"}]"#),
        1_000
    );
    let computer = r#"{"type":"computer_20250124","name":"computer"}"#;
    let bash = r#"{"type":"bash_20250124","name":"bash"}"#;
    let editor = r#"{"type":"text_editor_20250728","name":"str_replace_based_edit_tool"}"#;
    assert_eq!(own(&format!(r#""tools":[{computer},{bash},{editor}]"#)), 1_000 + 1_650 + 330 + 940);
    // No number is published for this tool.
    assert_eq!(own(r#""tools":[{"type":"memory_20250818","name":"memory"}]"#), 1_000 + 2_000);
    let function = r#"{"type":"function","function":{"name":"f"}}"#;
    assert_eq!(
        estimated_tokens(ChatCompletions, &format!(r#""tools":[{function},{function}]"#)),
        1_000
    );
    assert_eq!(
        estimated_tokens(
            Responses,
            &format!(r#""tools":[{{"type":"namespace","name":"n","tools":[{function}]}}]"#)
        ),
        1_000
    );
    // LiteLLM asks some providers for a format with a tool.
    for (route, field) in
        [(ChatCompletions, "response_format"), (Responses, "text"), (Messages, "output_config")]
    {
        assert_eq!(
            estimated_tokens(route, &format!(r#""{field}":{{"type":"json_object"}}"#)),
            1_000,
            "{field}"
        );
    }
    // The gateway drops this tool, so the provider describes none.
    let search = r#""tools":[{"type":"web_search","external_web_access":false}]"#;
    assert_eq!(estimated_tokens(Responses, search), 1_000);
}

/// G9: A granted capability lets the provider add pages, tools of a server or an earlier conversation to the input. Such
/// a call holds as much as the largest context.
#[test]
fn a_granted_capability_is_bounded_by_the_largest_context() {
    let policy =
        BodyPolicy { capabilities: ProviderCapability::ALL.into(), ..BodyPolicy::default() };
    let bound = |route, fields: &str| {
        let body = format!(r#"{{"model":"m",{fields}}}"#);
        let call =
            admit_body(&policy, ScannedBody::scan_frame(route, body.clone().into()).unwrap());
        call.unwrap().input_bound.0 - body.len() as u64
    };
    for (route, fields) in [
        (Messages, r#""tools":[{"type":"web_search_20250305","name":"web_search"}]"#),
        (Messages, r#""mcp_servers":[{"type":"url","url":"https://x","name":"x"}]"#),
        (Responses, r#""tools":[{"type":"mcp","server_label":"x","server_url":"https://x"}]"#),
        (Responses, r#""previous_response_id":"resp_1""#),
        (Responses, r#""input":[{"type":"item_reference","id":"msg_1"}]"#),
        (ChatCompletions, r#""web_search_options":{}"#),
        (ChatCompletions, r#""extra_body":{"enable_search":true}"#),
    ] {
        let most = bound(route, fields);
        assert!((1_000_000..1_010_000).contains(&most), "{fields}: {most}");
    }
    for (route, fields) in [
        (Responses, r#""previous_response_id":null"#),
        (Responses, r#""background":true"#),
        (ChatCompletions, r#""enable_search":false"#),
    ] {
        assert_eq!(bound(route, fields), 0, "{fields}");
    }
    let searches = ScannedBody::scan_frame(ChatCompletions, br#"{"model":"sonar"}"#[..].into());
    assert!(admit_body(&policy, searches.unwrap()).unwrap().input_bound.0 > 1_000_000);
}

/// G9: The head of audio or video does not bound its length, wherever its type is stated; the head of a WAV does.
#[test]
fn sound_and_video_are_reserved_for() {
    for (part, tokens) in [
        (r#"{"type":"file","file":{"file_data":"data:video/mp4;base64,AAAA"}}"#, 1_000_000),
        (r#"{"type":"file","file":{"file_data":"data:audio/flac;base64,AAAA"}}"#, 200_000),
        (
            r#"{"type":"file","file":{"file_data":"data:text/plain;base64,AAAA","format":"video/mp4"}}"#,
            1_000_000,
        ),
        (
            r#"{"type":"file","file":{"format":"audio/flac","file_data":"data:text/plain;base64,AA"}}"#,
            200_000,
        ),
        (r#"{"type":"video_url","video_url":{"url":"data:video/webm;base64,AAAA"}}"#, 1_000_000),
        (r#"{"type":"image_url","image_url":{"url":"data:video/webm;base64,AAAA"}}"#, 1_000_000),
        (r#"{"type":"input_audio","input_audio":{"data":"AAAA","format":"mp3"}}"#, 200_000),
        (
            r#"{"type":"input_audio","input_audio":{"data":"AAAA","format":"mp3"},"detail":"low"}"#,
            200_000,
        ),
        (r#"{"type":"media","mime_type":"video/mp4","data":"AAAA"}"#, 1_000_000),
        (r#"{"type":"video","source":{"type":"base64","data":"AAAA"}}"#, 1_000_000),
        (
            r#"{"type":"image","source":{"type":"base64","media_type":"video/mp4","data":"AAAA"}}"#,
            1_000_000,
        ),
        (r#"{"type":"x","source":{"type":"base64","data":"AAAAIGZ0eXBpc29t"}}"#, 1_000_000),
        (
            r#"{"type":"input_audio","input_audio":{"data":"UklGRgAAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAA","format":"wav"}}"#,
            1,
        ),
        (r#"{"type":"redacted_thinking","data":"AAAA"}"#, 0),
    ] {
        let parts = format!(r#""messages":[{{"role":"user","content":[{part}]}}]"#);
        assert_eq!(estimated_tokens(ChatCompletions, &parts), tokens, "{part}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// G9: Tokens are reserved for a body of any size, whichever way it is read, and only padding changes the
    /// reservation.
    #[test]
    fn padding_is_all_that_a_larger_body_adds(
        media in prop::collection::vec(prop::sample::select(MEDIA), 0..4),
        padding in 0_usize..9000,
        split in any::<prop::sample::Index>(),
    ) {
        let parts = media.iter().map(|data| format!(r#"{{"type":"x","source":{{"data":"{data}"}}}}"#));
        let parts = parts.collect::<Vec<_>>().join(",");
        let body = |padding| {
            format!(r#"{{"model":"m","messages":[{{"role":"user","content":[{parts}]}}]{}}}"#, " ".repeat(padding))
        };
        let (small, large) = (body(0), body(padding));
        let of = |body: &str| reserved_tokens(ChatCompletions, &BodyPolicy::default(), body);
        let text = |body: &str| (body.len() as u64).div_ceil(3);
        prop_assert_eq!(of(&small) - text(&small), of(&large) - text(&large));
        let (head, tail) = small.as_bytes().split_at(split.index(small.len()));
        let halves = [head, tail].map(bytes::Bytes::copy_from_slice);
        let halved = admit_body(&BodyPolicy::default(), read_frames(ChatCompletions, halves).unwrap()).unwrap();
        prop_assert_eq!(halved.input_estimate.0, of(&small));
        prop_assert!(of(&small) >= text(&small) + 258 * media.len() as u64);
    }
}

/// Parts whose data costs more than its length.
const MEDIA: &[&str] = &[
    "iVBORw0KGgoAAAANSUhEUgAACAAAAAMACAIAAAA=",
    "data:image/avif;base64,AAAA",
    "R0lGODlhAQABAAAAACwAAAAAAQABAA==",
    "JVBERi0xLjc=",
    "JVBERi0xLjQKL1R5cGUvUGFnZS9Db3VudCAxPj4=",
    "data:audio/flac;base64,ZkxhQw==",
    "AAAAIGZ0eXBpc29t",
];

/// G6: An address in the input of a model that embeds only text is text. For another model it may be fetched.
#[test]
fn an_address_is_embedded_as_text_where_the_model_has_nothing_else() {
    let input = r#""input":["https://x is a site","http://x","//x/y","ftp://x"]"#;
    let embed = |policy: &BodyPolicy, model: &str, input: &str| {
        send_body(Embeddings, policy, &format!(r#"{{"model":"{model}",{input}}}"#))
    };
    let ours = BodyPolicy {
        aliases: [
            ("text-embedding-ours", "ours"),
            ("plain", "bge-m3"),
            ("text-embedding-x", "our-clip"),
        ]
        .map(|(name, upstream)| (name.to_owned(), upstream.to_owned()))
        .into(),
        ..BodyPolicy::default()
    };
    for model in ["text-embedding-3-small", "text-embedding-ours", "plain"] {
        assert!(embed(&ours, model, input).is_ok(), "{model}");
        // LiteLLM reads these addresses itself, for whichever model is behind the name.
        for read in ["gs://b/x", "S3://b/x", "files/abc"] {
            embed(&ours, model, &format!(r#""input":["{read}"]"#)).unwrap_err();
        }
    }
    for model in ["ours", "jina-clip-v2", "text-embedding-x"] {
        let refusal = embed(&ours, model, input).unwrap_err();
        assert_eq!(
            (refusal.code(), refusal.field_at_fault()),
            ("capability_not_granted", "input"),
            "{model}"
        );
    }
    let granted = BodyPolicy {
        capabilities: [ProviderCapability::RemoteMedia].into(),
        ..BodyPolicy::default()
    };
    assert!(embed(&granted, "ours", input).is_ok());
}

/// G9: If the provider shortens a conversation first, the model reads and writes twice, and both passes are reserved
/// for.
#[test]
fn a_second_pass_is_reserved_for() {
    let call = |more: &str| {
        let body = format!(r#"{{"model":"m","max_tokens":500,"messages":[]{more}}}"#);
        super::admit_in(Messages, &BodyPolicy::default(), split_frames(body.as_bytes(), 4096))
            .unwrap()
    };
    let once = call("");
    assert_eq!((once.passes, once.generated_texts(), once.max_output().unwrap().0), (1, 1, 500));
    let edits = r#","context_management":{"edits":[{"type":"compact_20260112"}]}"#;
    let twice = call(edits);
    assert_eq!(
        (twice.passes, twice.generated_texts(), twice.max_output().unwrap().0),
        (2, 2, 1000)
    );
}

/// The names of capabilities are stable, because policies and refusals contain them.
#[test]
fn capabilities_are_parsed_from_their_own_names() {
    for capability in ProviderCapability::ALL {
        let name = format!("\"{}\"", capability.name());
        assert_eq!(serde_json::from_str::<ProviderCapability>(&name).unwrap(), capability);
    }
}

fn refused_fields(route: GatewayRoute, fields: &str) -> BodyPolicyError {
    send_body(route, &BodyPolicy::default(), &format!(r#"{{"model":"m",{fields}}}"#))
        .expect_err(fields)
}

/// G6: A file id that is an address is fetched, so it needs both capabilities. Google's file ids are addresses.
#[test]
fn an_id_that_is_an_address_needs_to_be_fetched() {
    let file = |id: &str, capabilities: &[ProviderCapability]| {
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"file","file":{{"file_id":"{id}"}}}}]}}]}}"#
        );
        let capabilities = capabilities.iter().copied().collect();
        send_body(ChatCompletions, &BodyPolicy { capabilities, ..BodyPolicy::default() }, &body)
    };
    let (ids, both) = (
        &[ProviderCapability::FileIds][..],
        &[ProviderCapability::FileIds, ProviderCapability::RemoteMedia][..],
    );
    for id in ["https://x/?leak=secret", "gs://bucket/x"] {
        assert!(file(id, ids).is_err(), "{id}");
        assert!(file(id, both).is_ok(), "{id}");
    }
    for id in ["file-1", "https://generativelanguage.googleapis.com/v1beta/files/abc"] {
        assert!(file(id, ids).is_ok(), "{id}");
    }
}

const DENIED: &[(GatewayRoute, &str)] = &[
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"image","source":"https://x/?leak=secret"}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"source":["//host.example/x"],"type":"search_result"}]}]"#,
    ),
    (
        CountTokens,
        r#""messages":[{"role":"user","content":[{"type":"document","source":"gs://b/x"}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"document","document":"https://x"}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"file","file":"https://x/a.pdf"}]}]"#,
    ),
    (
        Responses,
        r#""input":[{"role":"user","content":[{"type":"input_image","source":"https://x"}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"assistant","audio":{"id":"audio_1"}},{"role":"user","content":"hi"}]"#,
    ),
    (Responses, r#""input":[{"type":"image_generation_call","id":"ig_1","result":null}]"#),
    (
        Responses,
        r#""input":[{"type":"image_generation_call","id":"ig_1","result":"https://x/a.png"}]"#,
    ),
    (
        Responses,
        r#""input":[{"type":"code_interpreter_call","id":"ci_1","container_id":"cntr_1","code":"1"}]"#,
    ),
    (
        Responses,
        r#""input":[{"type":"shell_call","call_id":"c","environment":{"type":"container_reference","container_id":"cntr_1"}}]"#,
    ),
    (Responses, r#""tools":[{"type":"shell","container":"cntr_1"}]"#),
    (Responses, r#""tools":[{"container":{"type":"auto"},"type":"local_shell"}]"#),
    (Responses, r#""tools":[{"type":"shell","environment":"container_auto"}]"#),
    (Responses, r#""tools":[{"type":"shell","environment":{"container_id":"cntr_1"}}]"#),
    (
        Responses,
        r#""tools":[{"type":"shell","environment":{"type":"local","skills":[{"type":"skill_reference","skill_id":"skill_1"}]}}]"#,
    ),
    (
        Responses,
        r#""tools":[{"type":"shell","environment":{"type":"local","network_policy":{"type":"allowlist","allowed_domains":["x"]}}}]"#,
    ),
    (
        Responses,
        r#""tools":[{"type":"shell","environment":{"type":"local","network_policy":{"type":["allowlist"]}}}]"#,
    ),
    (Responses, r#""tools":[{"type":"shell","environment":{"type":["container_auto"]}}]"#),
    (ChatCompletions, r#""tools":[{"type":["web_search"],"name":"x"}]"#),
    (Responses, r#""tools":[{"type":{"a":1},"name":"x"}]"#),
    (Messages, r#""tools":[{"name":"x","type":[],"input_schema":{"type":"object"}}]"#),
    (Messages, r#""tools":[{"name":"x","type":5,"input_schema":{"type":"object"}}]"#),
    (Messages, r#""tools":[{"type":"bash_20250124","name":"bash","container":"container_1"}]"#),
    (ChatCompletions, r#""tools":[{"type":"web_search"}]"#),
    (ChatCompletions, r#""tools":[{"type":"function","web_search":{"enable":true}}]"#),
    (Messages, r#""tools":[{"type":"web_search"}]"#),
    (CountTokens, r#""tools":[{"type":"web_search"}]"#),
    (Responses, r#""tools":[{"type":"web_search","name":null}]"#),
    (ChatCompletions, r#""cached_content":"cachedContents/1""#),
    (Responses, r#""conversation_id":"conv_1""#),
    (Messages, r#""previous_response_id":"resp_1""#),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"https://x/a.mp3","format":"mp3"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"input_audio","input_audio":"HTTPS:x"}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"input_video","input_video":{"data":"s3://b/x"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"tomorrow","tomorrow":{"place":["ht\ntp://x"]}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"file","file":{"file_data":"                                                                      https://x"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"file","file":{"file_data":"\ufeff\u3000//evil.example/x"}}]}]"#,
    ),
    (Responses, r#""image":"https://x/?leak=secret""#),
    (
        Responses,
        r#""input":[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"https://x"}}]}]"#,
    ),
    (Embeddings, r#""input":["text","gs://bucket/x"]"#),
    (Embeddings, r#""input":"s3://bucket/x""#),
    (Embeddings, r#""input":["https://x is a site"]"#),
    (Embeddings, r#""input":"HTTP:x""#),
    (Embeddings, r#""input":"//host/x""#),
    (Embeddings, r#""input":["text","files/abc-123"]"#),
    (Embeddings, r#""input":"https://generativelanguage.googleapis.com/v1beta/files/abc""#),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"tomorrow","tomorrow":"//host/x"}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"tomorrow","tomorrow":["\\\\localhost"]}]}]"#,
    ),
    (
        ChatCompletions,
        r#""tools":[{"type":"function","function":{"name":"litellm_web_search","parameters":{}}}]"#,
    ),
    (ChatCompletions, r#""functions":[{"name":"litellm_skill"}]"#),
    (Messages, r#""tools":[{"name":"litellm_web_search","input_schema":{}}]"#),
    (Messages, r#""tools":[{"type":"custom","name":"web_search","input_schema":{}}]"#),
    (Messages, r#""tools":[{"name":"WebSearch"}]"#),
    (ChatCompletions, r#""web_search_options":{}"#),
    (ChatCompletions, r#""search_parameters":{"mode":"on"}"#),
    (ChatCompletions, r#""enable_search":true"#),
    (ChatCompletions, r#""vector_store_ids":["vs"]"#),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"image","image":["https://x"]}]}]"#,
    ),
    (ChatCompletions, r#""tools":[{"type":"web_search_preview"}]"#),
    (
        ChatCompletions,
        r#""tools":[{"type":"mcp","server_label":"x","server_url":"litellm_proxy"}]"#,
    ),
    (
        ChatCompletions,
        r#""tools":[{"type":"function","function":{"name":"f"}},{"googleSearch":{}}]"#,
    ),
    (ChatCompletions, r#""tools":[{"type":"function","googleSearch":{}}]"#),
    (ChatCompletions, r#""functions":[{"url_context":{}}]"#),
    (ChatCompletions, r#""tools":[{"codeExecution":{}}]"#),
    (ChatCompletions, r#""tools":["web_search"]"#),
    (ChatCompletions, r#""tools":[{}]"#),
    (ChatCompletions, r#""tools":[{"type":5,"name":"f"}]"#),
    (ChatCompletions, r#""tools":[{"type":"Function","name":"f"}]"#),
    (ChatCompletions, r#""background":true"#),
    (ChatCompletions, r#""mcp_servers":[{"type":"url","url":"https://x"}]"#),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://x/?q=secret"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":"http://x"}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"video_url","video_url":{"url":"gs://b/x"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"file","file":{"file_id":"file-1"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"file","file":{"file_data":"https://x"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"document_url","document_url":"https://x"}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"tool","tool_call_id":"c","content":[{"type":"image_url","image_url":{"detail":"low","url":"//x"}}]}]"#,
    ),
    (Responses, r#""tools":[{"type":"web_search"}]"#),
    (Responses, r#""tools":[{"type":"web_search_2099_01_01"}]"#),
    (Responses, r#""tools":[{"type":"file_search","vector_store_ids":["vs"]}]"#),
    (Responses, r#""tools":[{"type":"code_interpreter","container":{"type":"auto"}}]"#),
    (Responses, r#""tools":[{"type":"programmatic_tool_calling"}]"#),
    (Responses, r#""tools":[{"type":"image_generation"}]"#),
    (Responses, r#""tools":[{"type":"mcp","server_url":"https://x","server_label":"x"}]"#),
    (Responses, r#""tools":[{"type":"shell","environment":{"type":"container_auto"}}]"#),
    (Responses, r#""tools":[{"type":"computer_hosted"}]"#),
    (Responses, r#""tools":[{"type":"teleport","name":"t"}]"#),
    (Responses, r#""tools":[{"type":"namespace","name":"n","tools":[{"type":"mcp"}]}]"#),
    (
        Responses,
        r#""input":[{"type":"additional_tools","role":"developer","tools":[{"type":"web_search"}]}]"#,
    ),
    (Responses, r#""input":[{"type":"tool_search_output","tools":[{"type":"mcp"}]}]"#),
    (Responses, r#""input":[{"type":"item_reference","id":"msg_1"}]"#),
    (Responses, r#""input":[{"id":"msg_1"}]"#),
    (Responses, r#""input":[{"type":null,"id":"msg_1"}]"#),
    (
        Responses,
        r#""input":[{"role":"user","content":[{"type":"input_image","image_url":"https://x"}]}]"#,
    ),
    (
        Responses,
        r#""input":[{"role":"user","content":[{"type":"input_image","file_id":"file-1"}]}]"#,
    ),
    (
        Responses,
        r#""input":[{"role":"user","content":[{"type":"input_file","file_url":"https://x"}]}]"#,
    ),
    (
        Responses,
        r#""input":[{"type":"function_call_output","call_id":"c","output":[{"type":"input_image","image_url":"https://x"}]}]"#,
    ),
    (Responses, r#""previous_response_id":"resp_1""#),
    (Responses, r#""conversation":{"id":"conv_1"}"#),
    (Responses, r#""prompt":{"id":"pmpt_1"}"#),
    (Responses, r#""background":true"#),
    (Messages, r#""tools":[{"type":"web_search_20250305","name":"web_search"}]"#),
    (Messages, r#""tools":[{"type":"web_fetch_20250910","name":"web_fetch"}]"#),
    (Messages, r#""tools":[{"type":"code_execution_20250825","name":"code_execution"}]"#),
    (Messages, r#""tools":[{"type":"mcp_toolset","mcp_server_name":"x"}]"#),
    (Messages, r#""tools":[{"type":"advisor_20260301","name":"advisor","model":"big"}]"#),
    (Messages, r#""mcp_servers":[{"type":"url","url":"https://x","name":"x"}]"#),
    (Messages, r#""container":"container_1""#),
    (Messages, r#""thread":{"type":"create"}"#),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"https://x"}}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"document","source":{"type":"file","file_id":"file_1"}}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"image","source":{"type":"url","url":"https://x"}}]}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"document","source":{"type":"content","content":[{"type":"image","source":{"type":"url","url":"HTTPS://x"}}]}}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"container_upload","file_id":"file_1"}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"tool_addition","tool":{"type":"tool_definition","definition":{"type":"web_fetch_20260318","name":"w"}}}]}]"#,
    ),
    (
        Messages,
        r#""system":[{"type":"text","text":"t"},{"type":"image","source":{"url":"https://x"}}]"#,
    ),
    (
        CountTokens,
        r#""messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"https://x"}}]}]"#,
    ),
    (Embeddings, r#""input":[{"content":[{"type":"image_url","image_url":{"url":"https://x"}}]}]"#),
    (
        ChatCompletions,
        r#""tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"$ref":"https://x/?leak=1"}}}}}]"#,
    ),
    (
        ChatCompletions,
        r##""functions":[{"name":"f","parameters":{"anyOf":[{"$ref":"#/$defs/a"},{"\u0024ref":"HTTP:x"}]}}]"##,
    ),
    (
        ChatCompletions,
        r#""response_format":{"type":"json_schema","json_schema":{"schema":{"$ref":"//host/x"}}}"#,
    ),
    (ChatCompletions, r#""guided_json":{"$dynamicRef":"https://x#meta"}"#),
    (ChatCompletions, r#""guided_json":{"$id":"https://x/dir/","items":{"$ref":"../other.json"}}"#),
    (Messages, r#""tools":[{"name":"f","input_schema":{"$ref":"/other","id":"//host/x"}}]"#),
    (ChatCompletions, r#""guided_json":" {\"$ref\":\"https://x\"}""#),
    (ChatCompletions, r#""structured_outputs":{"json":"{\"$ref\":\"https://x\"}"}"#),
    (ChatCompletions, r#""extra_body":{"guided_json":{"items":[[{"$ref":["https://x"]}]]}}"#),
    (Responses, r#""text":{"format":{"type":"json_schema","schema":{"$ref":" https://x"}}}"#),
    (
        Responses,
        r#""tools":[{"type":"function","name":"f","parameters":{"$ref":"file:///etc/x"}}]"#,
    ),
    (Messages, r#""tools":[{"name":"f","input_schema":{"$defs":{"a":{"$ref":"https://x"}}}}]"#),
    (Messages, r#""output_config":{"format":{"schema":{"$recursiveRef":"https://x"}}}"#),
    (ChatCompletions, r#""audio":{"voice":{"id":"https://x/voice"},"format":"mp3"}"#),
    (ChatCompletions, r#""audio":{"voice":["alloy",{"tomorrow":"s3://x"},"//host/x"]}"#),
];

const ALLOWED: &[(GatewayRoute, &str)] = &[
    // References within the schema, a schema's own name and its dialect, and a property that is called like a reference.
    (
        ChatCompletions,
        r##""tools":[{"type":"function","function":{"name":"f","parameters":{"$schema":"https://json-schema.org/draft/2020-12/schema","$id":"https://x/f.json","$ref":"#/$defs/a","$defs":{"a":{"type":"string","format":"uri","default":"https://x"},"b":{"$ref":"#a"},"$ref":{"description":"https://x","enum":["https://x"]}}}}}]"##,
    ),
    // A relative reference without an address to begin at, and properties that are called like names of schemas.
    (ChatCompletions, r#""guided_json":{"$id":"f.json","$ref":"other.json"}"#),
    (
        ChatCompletions,
        r##""guided_json":{"properties":{"id":{"$ref":"other.json"},"json":{"$ref":"#a"}},"json":{}}"##,
    ),
    // What an agent writes about schemas is the client's own.
    (
        Messages,
        r#""messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"schema":{"$ref":"https://x"}}}]}]"#,
    ),
    // A voice of the account is a name, like that of a model.
    (ChatCompletions, r#""audio":{"voice":{"id":"voice_1234"},"format":"mp3"}"#),
    (ChatCompletions, r#""audio":{"voice":"alloy","format":"wav"}"#),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"source":"https://x","type":"search_result","title":"t","content":[]},{"type":"document","source":"notes/a.md"}]}]"#,
    ),
    (
        Responses,
        r#""input":[{"type":"image_generation_call","id":"ig_1","result":"iVBORw0KGgo="},{"type":"shell_call","call_id":"c","environment":{"type":"local"},"container_id":null},{"type":"shell_call","environment":null,"file_ids":[]}]"#,
    ),
    (
        Responses,
        r#""tools":[{"type":"shell","container":null,"environment":{"type":"local","skills":[{"name":"s","description":"d","path":"/skills/s"}],"network_policy":{"type":"disabled"}}}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":"https://x"},{"role":"tool","tool_call_id":"a://b","content":"https://x"},{"role":"user","content":[{"type":"text","text":"https://x"}]}]"#,
    ),
    (
        Responses,
        r#""input":[{"type":"function_call_output","call_id":"c","output":"https://x"},{"type":"message","role":"user","content":[{"type":"input_text","text":"s3://x"}]}]"#,
    ),
    (Responses, r#""input":"https://x""#),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"https://x"},{"type":"document","title":"http://x","context":"http://x","source":{"type":"text","media_type":"text/plain","data":"note: a page"}}]}]"#,
    ),
    (
        Embeddings,
        r#""input":["note: x","a","file: src/main.rs","// a comment","files/src/main.rs","files/","https:","a https://x","data:image/png;base64,AA=="]"#,
    ),
    (Messages, r#""tools":[{"name":"WebSearch","input_schema":{"type":"object"}}]"#),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":"ephemeral","ttl":"1h"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""tools":[{"type":"function","function":{"name":"f","parameters":{"type":"mcp","properties":{"url":{"type":"web_search"},"file_id":{},"image_url":"https://x"}}}}]"#,
    ),
    (
        ChatCompletions,
        r#""tools":[{"type":"custom","custom":{"name":"c","format":{"type":"grammar"}}}],"background":null"#,
    ),
    (ChatCompletions, r#""functions":[{"name":"f","parameters":{"tools":[{"type":"mcp"}]}}]"#),
    (
        ChatCompletions,
        r#""messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"url\":\"https://x\"}"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":"{\"type\":\"web_search\",\"image_url\":\"https://x\"}"}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}},{"type":"file","file":{"filename":"f","file_data":"data:application/pdf;base64,AA=="}},{"type":"input_audio","input_audio":{"data":"//uQ","format":"mp3"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"user","content":[{"type":"file","file":{"file_data":"//uQxAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""messages":[{"role":"assistant","content":"x","annotations":[{"type":"url_citation","url_citation":{"url":"https://x"}}]}]"#,
    ),
    (
        ChatCompletions,
        r#""response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{"image_url":{"type":"string"}}}}}"#,
    ),
    (
        Responses,
        r#""tools":[{"type":"function","name":"f","parameters":{"properties":{"file_id":{"type":"string"}}},"strict":true},{"type":"custom","name":"apply_patch","format":{"type":"grammar"}},{"type":"local_shell"},{"type":"apply_patch"},{"type":"shell","environment":{"type":"local"}},{"type":"computer_use_preview","environment":"browser"},{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]},{"type":"tool_search"}]"#,
    ),
    (
        Responses,
        r#""input":[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"https://x"},{"type":"reasoning","id":"rs","summary":[],"encrypted_content":"x"},{"role":"user","content":"hello"},{"type":"local_shell_call","action":{"type":"exec","command":["curl","https://x"]}},{"type":"web_search_call","id":"ws","action":{"type":"open_page","url":"https://x"}}]"#,
    ),
    (
        Responses,
        r#""input":[{"type":"message","role":"assistant","content":[{"type":"output_text","text":"x","annotations":[{"type":"file_citation","file_id":"file-1"},{"type":"url_citation","url":"https://x"}]}]}]"#,
    ),
    (
        Responses,
        r#""input":"https://x","previous_response_id":null,"background":false,"include":["reasoning.encrypted_content"]"#,
    ),
    (
        Responses,
        r#""input":[{"role":"user","content":[{"type":"input_image","image_url":"DATA:image/png;base64,AA=="}]}]"#,
    ),
    (
        Responses,
        r#""input":[{"type":"mcp_list_tools","id":"m","server_label":"s","tools":[{"name":"t","input_schema":{"type":"mcp"}}]}]"#,
    ),
    (
        Messages,
        r#""tools":[{"name":"fetch","description":"d","input_schema":{"type":"object","properties":{"url":{"type":"string","format":"uri"},"type":{"const":"mcp"}}}},{"type":"custom","name":"c","input_schema":{"type":"object"}},{"type":"bash_20250124","name":"bash"},{"type":"text_editor_20250728","name":"e"},{"type":"memory_20250818","name":"memory"},{"type":"computer_20250124","name":"computer","display_width_px":1},{"type":"computer_toolset_20260801"},{"type":"browser_toolset_20260801"},{"type":"tool_search_tool_regex_20251119","name":"t"}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"url":"https://x","image_url":"https://x","file_id":5,"source":{"type":"url","url":"https://x"},"tools":[{"type":"mcp"}]}}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"https://x"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA=="}}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"user","content":[{"type":"search_result","source":"https://x","title":"t","content":[{"type":"text","text":"x"}]},{"type":"document","source":{"type":"text","data":"https://x"},"citations":{"enabled":true}}]}]"#,
    ),
    (
        Messages,
        r#""messages":[{"role":"assistant","content":[{"type":"web_search_tool_result","tool_use_id":"s","content":[{"type":"web_search_result","url":"https://x","title":"t"}]},{"type":"text","text":"x","citations":[{"type":"web_search_result_location","url":"https://x"}]}]}]"#,
    ),
    (
        Messages,
        r#""context_management":{"edits":[{"type":"clear_tool_uses_20250919"}]},"mcp_servers":[],"container":null"#,
    ),
];
