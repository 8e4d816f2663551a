"""The live page's conversations: what is sent, kept in the browser, stopped, edited, and shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helpers.browser import BROWSER_TESTS

pytestmark = BROWSER_TESTS


@pytest.fixture
def viewer(look, front):
    return look(front, kind="text", is_fed=True)


def answered(viewer: Any, prompt: str, text: str) -> None:
    """A whole turn."""
    viewer.ask(prompt, mode="chat")
    viewer.feed(content=text)
    viewer.feed(finish_reason="stop")
    viewer.finish()


def turns(viewer: Any) -> list[tuple[str, str]]:
    """Prompts and answers, as they are shown."""
    said = viewer.page.locator(".said").all_inner_texts()
    return list(zip(said, viewer.page.locator(".body").all_inner_texts(), strict=True))


def click(viewer: Any, label: str) -> None:
    viewer.page.locator(f"[aria-label='{label}']").click()


def kept(viewer: Any) -> list[dict[str, Any]]:
    """The conversations in localStorage."""
    names = "Object.keys(localStorage).filter((it) => it.startsWith('slipstream.conversation.'))"
    found = viewer.page.evaluate(f"{names}.map((it) => localStorage.getItem(it))")
    return [json.loads(each) for each in found]


def titles(viewer: Any) -> list[str]:
    found: list[str] = viewer.page.locator("#conversations option").all_inner_texts()
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_chat_is_sent_with_the_turns_before_it(viewer):
    viewer.set(system="Be short.")
    answered(viewer, "One?", "1")
    answered(viewer, "Two?", "2")
    system = {"role": "system", "content": "Be short."}
    assert viewer.asked[0]["messages"] == [system, user("One?")]
    assert viewer.asked[1]["messages"] == [system, user("One?"), assistant("1"), user("Two?")]
    assert turns(viewer) == [("One?", "1"), ("Two?", "2")]
    assert viewer.page.locator("#prompt").input_value() == ""
    assert viewer.errors == []


def test_settings_go_by_their_names_and_stay(viewer):
    answered(viewer, "Before", "x")
    told = {"stream", "stream_options", "messages", "logprobs", "top_logprobs"}
    assert viewer.asked[0].keys() - told == {"temperature"}
    wanted = {
        "temperature": 0.5,
        "max_tokens": 7,
        "seed": -3,
        "top_p": 0.25,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    viewer.set(**{name: str(value) for name, value in wanted.items()}, stops="END\n\\n\\n")
    answered(viewer, "Now", "y")
    expected = {**wanted, "stop": ["END", "\n\n"]}
    assert {name: viewer.asked[1][name] for name in expected} == expected
    viewer.page.reload()
    viewer.wait_for("document.getElementById('top-k').value === '40'")
    viewer.page.locator("#settings-open").click()
    viewer.page.locator("#defaults").click()
    viewer.page.locator("#settings-done").click()
    answered(viewer, "After", "z")
    assert viewer.asked[0].keys() - told == {"temperature"}


def test_a_wrong_setting_is_shown_and_nothing_is_sent(viewer):
    viewer.page.locator("#settings-open").click()
    viewer.page.locator("#top-p").fill("7")
    viewer.page.keyboard.press("Escape")
    viewer.ask("Once", mode="chat")
    assert viewer.page.locator("#settings").evaluate("it => it.open")
    assert viewer.asked == []
    assert viewer.page.locator(".turn").count() == 0


def test_what_was_said_is_there_after_a_reload(viewer):
    viewer.set(system="Be short.")
    answered(viewer, "One?", "**1**")
    viewer.page.reload()
    viewer.wait_for("document.querySelectorAll('.turn').length === 1")
    assert turns(viewer) == [("One?", "1")]
    assert viewer.page.locator(".body strong").count() == 1
    answered(viewer, "Two?", "2")
    assert [each["content"] for each in viewer.asked[0]["messages"]] == [
        "Be short.",
        "One?",
        "**1**",
        "Two?",
    ]
    assert len(kept(viewer)) == 1


def test_an_answer_that_a_reload_cuts_off_goes_on_behind_its_last_event(viewer):
    viewer.ask("One?", mode="chat")
    viewer.feed(reasoning_content="Hm.", content="half of")
    viewer.wait_for("document.querySelector('.body').textContent === 'half of'")
    asked = viewer.asked
    viewer.page.reload()
    viewer.feed(content=" it")
    viewer.feed(finish_reason="stop")
    viewer.finish()
    assert turns(viewer) == [("One?", "half of it")]
    assert viewer.page.locator(".reasoning .plain").text_content() == "Hm."
    assert viewer.asked == asked
    assert viewer.page.evaluate("lastIds") == ["x"]
    assert "ended by itself" in viewer.page.inner_text(".numbers")
    assert kept(viewer)[0]["turns"][0]["answer"]["text"] == "half of it"
    assert viewer.page.evaluate("sessionStorage.length") == 0


def test_an_answer_whose_page_has_gone_is_kept_as_far_as_it_came(viewer):
    viewer.ask("One?", mode="chat")
    viewer.feed(content="half of")
    viewer.wait_for("document.querySelector('.body').textContent === 'half of'")
    viewer.page.goto("about:blank")
    viewer.open_tab()
    viewer.wait_for("document.querySelectorAll('.turn').length === 1")
    assert turns(viewer) == [("One?", "half of")]
    assert "stopped" in viewer.page.inner_text(".numbers")
    assert viewer.asked == []


def test_stop_keeps_what_came_and_the_conversation_goes_on(viewer):
    viewer.ask("One?", mode="chat")
    viewer.feed(content="half of")
    viewer.wait_for("document.querySelector('.body').textContent === 'half of'")
    viewer.page.keyboard.press("Escape")
    viewer.wait_for_end()
    assert "stopped" in viewer.page.inner_text(".numbers")
    assert kept(viewer)[0]["turns"][0]["answer"]["text"] == "half of"
    answered(viewer, "Two?", "2")
    assert viewer.asked[1]["messages"] == [user("One?"), assistant("half of"), user("Two?")]


def test_a_turn_without_an_answer_is_not_sent_again(viewer):
    viewer.ask("One?", mode="chat")
    viewer.wait_for("window.feed")
    viewer.page.locator("#stop").click()
    viewer.wait_for_end()
    answered(viewer, "Two?", "2")
    assert viewer.asked[1]["messages"] == [user("Two?")]


def test_regenerate_asks_the_last_turn_again(viewer):
    answered(viewer, "One?", "1")
    answered(viewer, "Two?", "2")
    assert viewer.page.locator(".again:visible").count() == 1
    click(viewer, "Regenerate answer 2")
    assert viewer.page.locator("#stop").is_enabled()
    viewer.feed(content="two")
    viewer.finish()
    assert viewer.asked[2]["messages"] == [user("One?"), assistant("1"), user("Two?")]
    assert turns(viewer) == [("One?", "1"), ("Two?", "two")]


def test_an_edited_turn_takes_the_place_of_itself_and_all_behind(viewer):
    answered(viewer, "One?", "1")
    answered(viewer, "Two?", "2")
    answered(viewer, "Three?", "3")
    click(viewer, "Edit prompt 2")
    field = viewer.page.locator(".edit textarea")
    assert field.input_value() == "Two?"
    viewer.page.keyboard.press("Escape")
    assert viewer.page.evaluate("document.activeElement.ariaLabel") == "Edit prompt 2"
    assert len(turns(viewer)) == 3
    viewer.page.keyboard.press("Enter")
    field.fill("Zwei?")
    viewer.page.keyboard.press("Enter")
    viewer.feed(content="zwei")
    viewer.finish()
    assert viewer.asked[-1]["messages"] == [user("One?"), assistant("1"), user("Zwei?")]
    assert turns(viewer) == [("One?", "1"), ("Zwei?", "zwei")]
    assert [each["prompt"] for each in kept(viewer)[0]["turns"]] == ["One?", "Zwei?"]


def test_while_an_answer_comes_none_else_is_asked(viewer):
    answered(viewer, "One?", "1")
    viewer.ask("Two?", mode="chat")
    viewer.feed(content="2")
    for label in ("Edit prompt 1", "Edit prompt 2", "Regenerate answer 2"):
        assert viewer.page.locator(f"[aria-label='{label}']").is_disabled()
    assert viewer.page.locator("#delete").is_disabled()  # what comes would bring it back
    viewer.page.locator("#prompt").fill("Three?")
    viewer.page.keyboard.press("Enter")
    viewer.finish()
    assert len(viewer.asked) == 2
    assert viewer.page.locator("#prompt").input_value() == "Three?"


def test_conversations_are_begun_opened_and_deleted(viewer):
    answered(viewer, "First question", "1")
    viewer.page.locator("#new").click()
    assert titles(viewer)[0] == "New conversation"
    assert turns(viewer) == []
    answered(viewer, "Second question", "2")
    assert viewer.asked[1]["messages"] == [user("Second question")]
    assert titles(viewer) == ["Second question", "First question"]
    viewer.page.locator("#conversations").select_option("First question")
    assert turns(viewer) == [("First question", "1")]
    answered(viewer, "And then?", "then")
    assert viewer.asked[2]["messages"][0] == user("First question")
    assert titles(viewer) == ["First question", "Second question"]
    viewer.page.on("dialog", lambda dialog: dialog.accept())
    viewer.page.locator("#delete").click()
    assert turns(viewer) == []
    assert [each["turns"][0]["prompt"] for each in kept(viewer)] == ["Second question"]
    assert viewer.errors == []


def test_another_conversation_stops_the_answer_and_keeps_it(viewer):
    viewer.ask("One?", mode="chat")
    viewer.feed(content="half of")
    viewer.wait_for("document.querySelector('.body').textContent === 'half of'")
    viewer.page.locator("#new").click()
    viewer.wait_for_end()
    assert turns(viewer) == []
    viewer.page.locator("#conversations").select_option("One?")
    assert turns(viewer) == [("One?", "half of")]


def test_the_history_is_bounded_and_the_oldest_goes(viewer):
    viewer.page.evaluate(
        """async () => {
          const { Conversation, Turn } = await import("/page/conversation/conversation.js");
          const { History } = await import("/page/conversation/history.js");
          const history = new History();
          window.fill = (prompt, text) => {
            const made = new Conversation();
            made.turns = [new Turn("chat", prompt)];
            made.turns[0].answer.text = text;
            return history.save(made);
          };
          for (let each = 0; each < 60; each += 1) fill(`Prompt ${each}`, "x");
        }"""
    )
    found = sorted(int(each["turns"][0]["prompt"].split()[1]) for each in kept(viewer))
    assert found == list(range(10, 60))
    assert viewer.page.evaluate("fill('large', 'y'.repeat(1_999_000))") is True
    assert [each["turns"][0]["prompt"] for each in kept(viewer)] != []
    size = "Object.values({ ...localStorage }).reduce((sum, it) => sum + it.length, 0)"
    assert viewer.page.evaluate(size) < 2_001_000
    # one that alone is too large is not kept, and takes no other's place
    before = len(kept(viewer))
    assert viewer.page.evaluate("fill('larger', 'y'.repeat(2_000_000))") is False
    assert len(kept(viewer)) == before


def test_what_is_not_a_conversation_is_passed_over(look, front):
    viewer = look(front, kind="text", is_fed=True)
    viewer.page.evaluate(
        """() => {
          const prefix = "slipstream.conversation.";
          const wrong = { id: "b", updated: 9e15, system: "", turns: [{ mode: "x", prompt: 1 }] };
          localStorage.setItem(`${prefix}a`, "{");
          localStorage.setItem(`${prefix}b`, JSON.stringify(wrong));
          localStorage.setItem("slipstream.settings", "[1");
          localStorage.setItem("slipstream.theme", "<b>");
        }"""
    )
    viewer.page.reload()
    answered(viewer, "One?", "1")
    assert titles(viewer) == ["One?"]
    assert viewer.errors == []


def test_two_tabs_that_go_on_with_one_conversation_make_two(viewer):
    answered(viewer, "One?", "1")
    first = viewer.page
    viewer.open_tab()
    answered(viewer, "Two?", "2")
    viewer.page = first
    answered(viewer, "Three?", "3")
    found = [[turn["prompt"] for turn in each["turns"]] for each in kept(viewer)]
    assert sorted(found) == [["One?", "Three?"], ["One?", "Two?"]]


def test_a_copy_is_the_text_as_the_model_wrote_it(look, front):
    permissions = ["clipboard-read", "clipboard-write"]
    viewer = look(front, kind="text", is_fed=True, permissions=permissions)
    answered(viewer, "*One*?", "**1**\n\n```python\nprint('a')\n```\n")
    note = "it => new MutationObserver(() => words.push(it.textContent))"
    for label, text in {
        "Copy prompt 1": "*One*?",
        "Copy answer 1": "**1**\n\n```python\nprint('a')\n```\n",
        "Copy code block 1 of answer 1": "print('a')\n",
    }.items():
        for has_clipboard in (True, False):  # pages that are not secure have none
            if not has_clipboard:
                viewer.page.evaluate(
                    "navigator.clipboard.writeText('before').then(() => Object.defineProperty("
                    "navigator, 'clipboard', { value: undefined, configurable: true }))"
                )
            viewer.page.evaluate("window.words = []")
            button = viewer.page.locator(f"[aria-label$='{label}']")
            button.evaluate(f"{note}.observe(it, {{ childList: true }})")
            button.click()
            viewer.wait_for("words.includes('Copied')")
            viewer.page.evaluate("delete navigator.clipboard")
            assert viewer.page.evaluate("navigator.clipboard.readText()") == text
    assert viewer.errors == []


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_apart_and_not_sent_again(viewer, name):
    viewer.ask("One?", mode="chat")
    viewer.feed(**{name: "Let me "})
    viewer.feed(**{name: "see."})
    viewer.wait_for("document.querySelector('.reasoning .plain')?.textContent === 'Let me see.'")
    reasoning = viewer.page.locator(".reasoning")
    assert reasoning.get_attribute("open") is not None
    assert viewer.text == ""
    viewer.feed(content="1")
    viewer.feed(finish_reason="stop")
    viewer.finish()
    assert reasoning.get_attribute("open") is None
    assert turns(viewer) == [("One?", "1")]
    answered(viewer, "Two?", "2")
    assert viewer.asked[1]["messages"] == [user("One?"), assistant("1"), user("Two?")]
    viewer.page.reload()
    viewer.wait_for("document.querySelector('.reasoning .plain')?.textContent === 'Let me see.'")


def test_tool_calls_are_shown_with_their_arguments(viewer):
    viewer.ask("Weather?", mode="chat")
    first = {"index": 0, "id": "a", "type": "function"}
    viewer.feed(tool_calls=[{**first, "function": {"name": "get_weather", "arguments": ""}}])
    viewer.feed(tool_calls=[{"index": 0, "function": {"arguments": '{"city": "<b>'}}])
    viewer.wait_for("/<b>/.test(document.querySelector('.call pre')?.textContent)")
    viewer.feed(tool_calls=[{"index": 0, "function": {"arguments": 'Oslo"}'}}])
    second = {**first, "index": 1, "id": "b"}
    viewer.feed(tool_calls=[{**second, "function": {"name": "now", "arguments": "{}"}}])
    viewer.feed(finish_reason="tool_calls")
    viewer.finish()
    assert viewer.page.locator(".call-name code").all_inner_texts() == ["get_weather", "now"]
    given = viewer.page.locator(".call pre").all_inner_texts()
    assert given == ['{\n  "city": "<b>Oslo"\n}', "{}"]
    assert "waits for its tools" in viewer.page.inner_text(".numbers")
    assert viewer.errors == []


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_switched(look, front, system):
    other = {"light": "dark", "dark": "light"}
    viewer = look(front, color_scheme=system)

    def shown() -> str:
        ground = viewer.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return "dark" if sum(json.loads(f"[{ground[4:-1]}]")) < 384 else "light"

    theme = viewer.page.locator("#theme")
    assert shown() == system
    viewer.page.emulate_media(color_scheme=other[system])
    assert shown() == other[system]
    viewer.page.emulate_media(color_scheme=system)
    viewer.wait_for(f"document.getElementById('theme').textContent === '{other[system].title()}'")
    theme.click()
    assert (shown(), theme.inner_text().lower()) == (other[system], system)
    viewer.page.reload()
    assert shown() == other[system]
    theme.click()  # back to the system's: it is followed again
    viewer.page.emulate_media(color_scheme=other[system])
    assert shown() == other[system]
