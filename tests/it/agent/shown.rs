//! R8: what somebody sees who watches an agent: its text and its tool, wherever its lines are cut.

use cogni_gateway::cli::run::shown::{Place, Shown};
use tokio::io::AsyncWriteExt;

const OUTPUT: &str = concat!(
    "cogni-init: somebody else's line\n",
    "{\"type\":\"text_delta\",\"text\":\"Let me \"}\n",
    "{\"type\":\"text_delta\",\"text\":\"look: ü\\n\"}\n",
    "{\"type\":\"text_delta\",\"text\":\"now\"}\n",
    "{\"type\":\"tool_call\",\"id\":\"1\",\"argv\":[\"sh\",\"-c\",\"echo 'a b'; exit 3\",\"\"]}\n",
    "{\"type\":\"tool_result\",\"id\":\"1\",\"exit_code\":3}\n",
    "{\"type\":\"tool_call\",\"id\":\"2\",\"argv\":[\"ls\",\"-l\"]}\n",
    "{\"type\":\"tool_result\",\"id\":\"2\",\"exit_code\":0}\n",
    "{\"type\":\"tool_result\",\"id\":\"3\",\"exit_code\":null}\n",
    "{\"type\":\"text_delta\",\"text\":\"\\u001b[2Jdone\\u0007\"}\n",
    "{\"payloads\":[],\"meta\":{}}\n",
    "{\"type\":\"something_else\"}\n",
);

async fn shown(chunks: impl Iterator<Item = &[u8]>) -> String {
    let mut seen = vec![];
    let mut shown = Shown::new(&mut seen, Place::default());
    for chunk in chunks {
        shown.write_all(chunk).await.unwrap();
        shown.flush().await.unwrap();
    }
    drop(shown);
    String::from_utf8(seen).unwrap()
}

#[tokio::test]
async fn an_agent_is_shown_as_one_would_read_it() {
    let bytes = OUTPUT.as_bytes();
    let whole = shown([bytes].into_iter()).await;
    insta::assert_snapshot!(whole, @r#"
    cogni-init: somebody else's line
    Let me look: ü
    now
    $ sh -c 'echo '\''a b'\''; exit 3' ''
    exit code 3
    $ ls -l
    killed, or not started
    �[2Jdone�
    {"type":"something_else"}
    "#);
    for at in 0..bytes.len() {
        assert_eq!(shown([&bytes[..at], &bytes[at..]].into_iter()).await, whole, "cut at {at}");
    }
    assert_eq!(shown(bytes.chunks(1)).await, whole);
}
